"""Step 1: the tests of the workers that need a CUDA device."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence

from tandem.gpu_report.findings import Notebook
from tandem.gpu_report.steps import ROOT

GPU_TESTS = ("-m", "gpu", "tests/workers/cuda/test_triton_kernel.py", "tests/workers")
"""The kernel's first: where it is wrong, so is all else. Of the rest, the families come last."""
SMALL_TESTS = ("tests/test_covering.py",)
"""The tests of a small report, where there is no such device: quick ones."""
OUTCOME = re.compile(
    r"^(?P<test>tests/\S+::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE
)
OUTCOME_OF_PROCESS = re.compile(
    r"^\[gw\d+\] \[ *\d+%\] (?P<outcome>PASSED|FAILED|ERROR|SKIPPED) (?P<test>tests/\S+::.+?) *$",
    re.MULTILINE,
)
"""An outcome as pytest-xdist writes it."""
NUM_PROCESSES = 8
SMALL_NUM_PROCESSES = 2
NUM_LAST_LINES = 60


def run(notebook: Notebook, *, is_small: bool) -> None:
    """Run pytest, as `make test-gpu` does, and note what each test came to."""
    tests = SMALL_TESTS if is_small else GPU_TESTS
    has_xdist = importlib.util.find_spec("xdist") is not None
    command = [
        *(sys.executable, "-m", "pytest", "-o", "addopts=", "-o", "filterwarnings=default"),
        *("-v", "--color=no", "-p", "no:cacheprovider", "--tb=short", *tests),
        *(
            ("--numprocesses", str(SMALL_NUM_PROCESSES if is_small else NUM_PROCESSES))
            if has_xdist
            else ()
        ),
    ]
    output, is_cut = _run(command, max(1.0, notebook.left_s))
    pattern = OUTCOME_OF_PROCESS if has_xdist else OUTCOME
    outcomes = [(found["test"], found["outcome"]) for found in pattern.finditer(output)]
    counts = {
        outcome.lower(): sum(found == outcome for _, found in outcomes)
        for outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    notebook.add("Checks", dict(counts))
    for test, outcome in outcomes:
        if outcome in ("FAILED", "ERROR"):
            notebook.note(f"{outcome.lower()}: `{test}`")
    if is_cut:
        notebook.skip("the checks after the last of these")
    if is_cut or counts["failed"] or counts["error"] or not outcomes:
        last_lines = "\n".join(output.splitlines()[-NUM_LAST_LINES:])
        notebook.note(f"The last lines of pytest:\n\n```\n{last_lines}\n```")


def _run(command: Sequence[str], timeout_s: float) -> tuple[str, bool]:
    """The output, and whether it ran out of time."""
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        return output.decode() if isinstance(output, bytes) else output, True
    return result.stdout, False
