"""`tandem gpu-report`: its options."""

import argparse
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tandem.gpu_report.report import run_here, run_in_child, run_steps, write_report

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tandem gpu-report", description="Measure the workers on this machine's GPU."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("docs/results"), help="folder to write to"
    )
    parser.add_argument("--minutes", type=float, default=4.5, help="how long all of it may take")
    parser.add_argument(
        "--small", action="store_true", help="run the same code on a CPU, with tiny models"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.small and not torch.cuda.is_available():
        logger.error("torch sees no CUDA device; --small runs the same code on a CPU")
        return 1
    run = run_here if options.small else run_in_child
    results = run_steps(partial(run, is_small=options.small), total_s=60.0 * options.minutes)
    page = write_report(options.output, results, is_small=options.small)
    logger.info("%s", page.read_text())
    logger.info("written to %s and %s", page, page.with_suffix(".json"))
    return 0 if not any(result.problem for result in results) else 1
