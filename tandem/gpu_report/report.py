"""The report: its steps, each with a share of the time, and the page that they come to."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.bench.report import environment, markdown_table
from tandem.gpu_report.findings import Findings, Row, read_findings
from tandem.gpu_report.steps import ROOT, STEPS, Step
from workers.errors import first_line

GRACE_S = 10.0
"""Seconds that a step may be late before it is ended."""
NUM_LOG_LINES = 40
OUR_WARNINGS = tuple(f"WARNING {package}." for package in ("workers", "cluster", "tandem"))
"""How a line begins that one of our modules has logged: see `steps.main`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one step came to."""

    title: str
    findings: Findings
    took_s: float
    problem: str = ""
    """Why it did not come to its end; empty if it did."""
    log: str = ""
    """The last lines of what its process wrote."""

    @property
    def warnings(self) -> list[str]:
        """What our own modules have warned of."""
        return [line for line in self.log.splitlines() if line.startswith(OUR_WARNINGS)]


Outcome = tuple[str, str]
"""The problem and the log of a step; both may be empty."""
Run = Callable[[Step, Path, float], Outcome]
"""Runs a step for so many seconds at most, its findings in a file."""


def run_steps(
    run: Run,
    *,
    total_s: float,
    steps: Sequence[Step] = STEPS,
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Run all steps, whatever becomes of each; what one leaves of its time is the later ones'."""
    started, share = clock(), 0.0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for step in steps:
            share += step.share
            began, path = clock(), Path(folder) / f"{step.name}.json"
            problem, log = run(step, path, max(1.0, started + share * total_s - began))
            results.append(
                Result(
                    title=step.title,
                    findings=read_findings(path),
                    took_s=clock() - began,
                    problem=problem,
                    log=log,
                )
            )
    return results


def run_in_child(step: Step, path: Path, time_s: float, *, is_small: bool) -> Outcome:
    """Run a step in a process of its own: what hangs or kills it is no other's."""
    command = [sys.executable, "-m", "tandem.gpu_report.steps", step.name, str(path), str(time_s)]
    try:
        result = subprocess.run(
            [*command, *(["--small"] if is_small else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=time_s + GRACE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return f"cut after {time_s + GRACE_S:.0f} s", _last_lines(expired.stdout)
    log = _last_lines(result.stdout)
    return f"failed with status {result.returncode}" if result.returncode else "", log


def _last_lines(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.splitlines()[-NUM_LOG_LINES:])


def run_here(step: Step, path: Path, time_s: float, *, is_small: bool) -> Outcome:
    """Run a step in this process; what it raises is its problem."""
    try:
        step.run(path, time_s, is_small=is_small)
    except Exception as error:
        return f"failed: {type(error).__name__}: {first_line(error)}", ""
    return "", ""


def write_report(folder: Path, results: Sequence[Result], *, is_small: bool) -> Path:
    """Write the page and its figures; returns the page."""
    made = environment()
    hardware = made["hardware"]
    card = hardware["gpu"] or "no GPU"
    name = "".join(c if c.isalnum() else "-" for c in card.lower())
    page = folder / f"{made['date'][:10]}-gpu-report-{name}.md"
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(format_page(made, results, is_small=is_small))
    figures = {**made, "is_small": is_small, "steps": [asdict(result) for result in results]}
    page.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
    return page


def format_page(made: Mapping[str, Any], results: Sequence[Result], *, is_small: bool) -> str:
    """The page, which says of each step what it did not run."""
    hardware = made["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items() if number)
    lines = [
        f"# GPU report: {hardware['gpu'] or 'run in small on a CPU'}",
        "",
        f"{made['date']}, commit {made['commit']}; {versions}; {hardware['num_cores']} cores. "
        "Written by `tandem gpu-report`: the workers alone, without Ray.",
    ]
    if is_small:
        lines += ["", "**In small: this shows that the code runs. Its figures mean nothing.**"]
    for number, result in enumerate(results, start=1):
        lines += ["", f"## {number}. {result.title}", "", f"Took {result.took_s:.0f} s."]
        if result.problem:
            lines += ["", f"**This step did not come to its end: {result.problem}.**"]
            lines += ["", "```", result.log, "```"]
        if result.warnings:
            lines += ["", "Warnings:", "", *(f"- {line}" for line in result.warnings)]
        lines += _format_findings(result.findings)
    return "\n".join(lines).rstrip() + "\n"


def _format_findings(findings: Findings) -> list[str]:
    lines = []
    for note in findings.notes:
        lines += ["", note]
    for title, rows in findings.tables.items():
        lines += ["", f"### {title}", "", _format_table(rows).rstrip()]
    if findings.not_run:
        lines += ["", "Not run: " + "; ".join(findings.not_run) + "."]
    if not findings.tables:
        lines += ["", "There are no figures."]
    return lines


def _format_table(rows: Sequence[Row]) -> str:
    """A column for every key of any row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return markdown_table({name: _cell_of(name) for name in names}, rows)


def _cell_of(name: str) -> Callable[[Row], str]:
    return lambda row: _format_cell(row.get(name))


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)
