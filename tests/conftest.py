"""Set before anything else is imported: what a test run may use of the machine."""

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.covering import all_cases, covering_cases

APP = "tests/integration/"

# Python's default of 700 new objects has it look for garbage so often that this takes 5 % of a run.
gc.set_threshold(20_000)
# Two cores are shared by everything a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing may be fetched: a test that names an unknown model must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton, where it is installed, runs its kernels on CPU tensors then.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Handles of Serve go on for a moment when their Ray has ended, and would start another one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# The default differs between ray.init and ray start, and writes a token to the home directory.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, default=100, help="random cases of each property test: see `make fuzz`"
    )
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run what is tried together in all combinations, not in pairs or by turns",
    )
    parser.addoption(
        "--seed", type=int, default=0, help="the seed of tests/compat/test_schemathesis.py"
    )


@pytest.fixture(scope="session")
def has_all_combinations(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("all_combinations"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases of the mark `covering`, whose arguments are values of each dimension."""
    for mark in metafunc.definition.iter_markers("covering"):
        dimensions = [
            [*values.items()]
            if isinstance(values, Mapping)
            else [(str(value), value) for value in values]
            for values in mark.kwargs.values()
        ]
        choose = all_cases if metafunc.config.getoption("all_combinations") else covering_cases
        cases = []
        for case in choose([len(values) for values in dimensions]):
            chosen = [values[index] for values, index in zip(dimensions, case, strict=True)]
            name = "-".join(name for name, _ in chosen)
            cases.append(pytest.param(*[value for _, value in chosen], id=name))
        metafunc.parametrize([*mark.kwargs], cases)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The app's tests take longest, so they come first: no process is left with them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(APP))


@pytest.hookimpl(optionalhook=True)  # the plugin is not where only the GPU's tests run
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of the app, which share a Ray, and begins with them.

    Tests of one file share its fixtures, so they run in one process too.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "app" if nodeid.startswith(APP) else nodeid.partition("::")[0]

    return FilesTogether(config, log)
