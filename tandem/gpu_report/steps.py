"""The steps of the report by name; as a program, it runs one of them."""

import argparse
import importlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.gpu_report.findings import Notebook

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of the report."""

    name: str
    """The module of this package whose `run` it is."""
    title: str
    share: float
    """The step's share of the report's time."""

    def run(self, path: Path, time_s: float, *, is_small: bool) -> None:
        """Run it in this process, its findings in a file."""
        notebook = Notebook(path, time_s=time_s, clock=time.monotonic)
        # imported where it runs: the device is nobody else's meanwhile
        module = importlib.import_module(f"tandem.gpu_report.{self.name}")
        module.run(notebook, is_small=is_small)


STEPS = (
    Step(name="checks", title="Checks of the workers on the device", share=0.25),
    Step(name="step_tables", title="Step times", share=0.25),
    Step(name="speed", title="Speed of the workers alone", share=0.28),
    Step(name="differences", title="Differences in bf16", share=0.12),
    Step(name="group", title="One rank of a tensor-parallel group", share=0.1),
)


def main() -> None:
    """Run the step that is named, for so many seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[step.name for step in STEPS])
    parser.add_argument("path", type=Path)
    parser.add_argument("time_s", type=float)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    (step,) = (step for step in STEPS if step.name == options.name)
    step.run(options.path, options.time_s, is_small=options.small)


if __name__ == "__main__":
    main()
