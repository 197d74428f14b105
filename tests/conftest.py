"""Set before anything else is imported: what a test run may use of the machine."""

import os
from pathlib import Path
from typing import Any

import pytest

# Two cores are shared by everything a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing may be fetched: a test that names an unknown model must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton, where it is installed, runs its kernels on CPU tensors then.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The default differs between ray.init and ray start, and writes a token to the home directory.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, default=300, help="random cases of each property test: see `make fuzz`"
    )
    parser.addoption(
        "--seed", type=int, default=0, help="the seed of tests/compat/test_schemathesis.py"
    )


@pytest.hookimpl(optionalhook=True)  # the plugin is not where only the GPU's tests run
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of the app, which share a Ray, and begins with them."""
    from xdist.scheduler import LoadScopeScheduling

    class AppTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "app" if nodeid.startswith("tests/integration/") else nodeid

    return AppTogether(config, log)
