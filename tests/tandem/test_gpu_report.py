"""The GPU report in small: its code on a CPU, and that no step can spoil another."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.gpu_report import report
from tandem.gpu_report.cli import main
from tandem.gpu_report.findings import Notebook, read_findings
from tandem.gpu_report.report import run_here, run_in_child, run_steps
from tandem.gpu_report.steps import ROOT, STEPS, Step
from tandem.gpu_report.subjects import time_sizes

NOT_ON_THE_MACHINE = ("ray", "pydantic", "fastapi", "starlette", "grpc", "click", "matplotlib")


def test_all_steps_run_in_small(tmp_path: Path) -> None:
    assert main(["--small", "--output", str(tmp_path), "--minutes", "1"]) == 0
    (page,) = tmp_path.glob("*.md")
    text = page.read_text()
    for step in STEPS:
        assert step.title in text
    assert "Its figures mean nothing" in text
    assert "graphs of the 6M target: a CPU has none" in text
    assert "The texts of the rank are those of the target alone." in text
    (data,) = tmp_path.glob("*.json")
    steps = json.loads(data.read_text())["steps"]
    assert [step["problem"] for step in steps] == [""] * len(STEPS)
    assert all(step["findings"]["tables"] for step in steps)


def test_a_step_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    def run(step: Step, path: Path, time_s: float) -> tuple[str, str]:
        Notebook(path, time_s=time_s, clock=lambda: 0.0).add("Figures", {"seconds": 0.5})
        is_bad = step is STEPS[0]
        return ("failed", "WARNING workers.cuda: no graphs\nTraceback") if is_bad else ("", "")

    results = run_steps(run, total_s=100.0)
    page = report.write_report(tmp_path, results, is_small=False).read_text()
    assert page.count("did not come to its end") == 1
    assert page.count("- WARNING workers.cuda: no graphs") == 1
    assert page.count("| 0.5 |") == len(STEPS)  # what it had found is kept


def test_what_a_step_raises_is_its_problem(tmp_path: Path) -> None:
    unknown = Step(name="nothing", title="Nothing", share=1.0)
    path = tmp_path / "findings.json"
    assert "failed: ModuleNotFoundError" in run_here(unknown, path, 1.0, is_small=True)[0]
    problem, log = run_in_child(unknown, path, 60.0, is_small=True)
    assert problem == "failed with status 2"
    assert "invalid choice: 'nothing'" in log


def test_a_step_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "GRACE_S", 0.0)
    problem, _ = run_in_child(STEPS[1], tmp_path / "f", 0.05, is_small=True)
    assert problem.startswith("cut after")
    assert read_findings(tmp_path / "f").tables == {}


def test_time_that_a_step_leaves_is_for_the_later_ones() -> None:
    now = 0.0
    given: list[float] = []

    def run(_: Step, __: Path, time_s: float) -> tuple[str, str]:
        nonlocal now
        given.append(time_s)
        now += 1.0
        return "", ""

    steps = [Step(name=name, title=name, share=0.5) for name in ("one", "two")]
    run_steps(run, total_s=100.0, steps=steps, clock=lambda: now)
    assert given == [50.0, 99.0]
    assert sum(step.share for step in STEPS) == pytest.approx(1.0)


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    notebook = Notebook(path, time_s=10.0, clock=iter([0.0, 5.0, 5.0, 11.0]).__next__)
    assert notebook.has_time("the first")
    assert not notebook.has_time("the second", needs_s=6.0)
    assert not notebook.has_time("the third")
    assert read_findings(path).not_run == ["the second", "the third"]


def test_checks_that_fail_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_it():\n    assert 1 == 2, 'one is not two'\n")
    monkeypatch.setattr("tandem.gpu_report.checks.SMALL_TESTS", (str(failing),))
    assert run_here(STEPS[0], tmp_path / "f", 60.0, is_small=True) == ("", "")
    assert any("one is not two" in note for note in read_findings(tmp_path / "f").notes)


def test_it_needs_nothing_that_a_bare_machine_lacks() -> None:
    """Nor does it say anything of packages of quantization, which warn when transformers imports
    them, as it does wherever they are installed."""
    names = ["cli", *(step.name for step in STEPS)]
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_ON_THE_MACHINE!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import tandem.__main__
for name in {names!r}:
    __import__("tandem.gpu_report." + name)
import workers.mpt, workers.drafters.model, workers.vocabulary
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--output", str(tmp_path)]) == 1
    assert "torch sees no CUDA device" in caplog.text


def test_sizes_that_there_was_no_time_for_are_named(tmp_path: Path) -> None:
    """A target whose steps take a second each has time for one of three."""
    path = tmp_path / "findings.json"
    notebook = Notebook(path, time_s=10.0, clock=lambda: 0.0)
    slow: Any = SimpleNamespace(time_step=lambda _: 1.0)
    sizes = ((1, 1), (1, 8), (8, 64))
    times = time_sizes(notebook, slow, "steps", sizes, budget_s=1.0)
    assert [time.num_tokens for time in times] == [1]
    assert read_findings(path).not_run == [
        "steps: 8 tokens of 1 sequences",
        "steps: 64 tokens of 8 sequences",
    ]
