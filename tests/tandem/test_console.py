"""Which lines of the processes reach the terminal."""

import io
import subprocess
import sys

import pytest

from tandem.console import Console, WorkerLog, is_worth_reading

INFO = "INFO 2026-11-26 09:11:58,250 serve 53 -- Started Serve."
WARNING = "WARNING 2026-11-26 09:12:28,458 controller 491 -- a worker is lost"
CRASH = "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (INFO, False),
        (WARNING, True),
        ("ERROR 2026-11-26 09:12:28,458 controller 491 -- it failed", True),
        (CRASH, True),
        ("Traceback (most recent call last):", True),
        ("[2026-11-26 09:11:49,105 W 53 53] network_util.cc:330: Failed to determine", False),
        ("[2026-11-26 09:11:49,105 E 53 53] core_worker.cc:1: a check failed", True),
        ("Loading weights:   0%|          | 0/20 [00:00<?, ?it/s]", False),
        (
            "WARNING 2026-11-26 09:12:28,458 controller 491 -- Deployment 'Router' in application "
            "'default' has 1 replicas that have taken more than 30s to initialize.",
            False,
        ),
        ("This may be caused by a slow __init__ or reconfigure method.", False),
        ("", False),
    ],
)
def test_notes_and_false_alarms_are_left_out(line: str, expected: bool) -> None:
    assert is_worth_reading(line) is expected


def test_lines_are_held_until_the_start_has_succeeded() -> None:
    shown = io.StringIO()
    log = WorkerLog(Console(io.StringIO(), shown))
    log.receive({"actor_name": "ServeReplica:default:TargetGroup", "lines": [INFO, WARNING]})
    assert shown.getvalue() == ""
    log.release()
    assert shown.getvalue() == f"TargetGroup: {WARNING}\n"
    log.receive({"pid": 12, "lines": [CRASH]})
    assert shown.getvalue().splitlines()[-1] == f"12: {CRASH}"


def test_nothing_is_shown_of_an_end_that_is_wanted() -> None:
    shown = io.StringIO()
    log = WorkerLog(Console(io.StringIO(), shown))
    log.receive({"pid": 12, "lines": [CRASH]})
    log.silence()
    log.receive({"pid": 12, "lines": [CRASH]})
    log.release()
    assert shown.getvalue() == ""


def test_the_autoscalers_reports_are_left_out() -> None:
    shown = io.StringIO()
    log = WorkerLog(Console(io.StringIO(), shown))
    log.release()
    log.receive({"pid": "autoscaler", "lines": ["======== Autoscaler status ========"]})
    assert shown.getvalue() == ""


@pytest.mark.parametrize(
    "words",
    [["--help"], ["plan", "--help"], ["bench", "app", "--help"], ["load", "flood", "--help"]],
    ids=str,
)
def test_help_comes_without_imports_that_take_seconds(words: list[str]) -> None:
    code = (
        "import sys; from tandem.__main__ import main\n"
        f"try: main({words})\n"
        "except SystemExit: sys.exit(bool(sys.modules.keys() & {'ray', 'torch', 'transformers'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: tandem" in run.stdout
