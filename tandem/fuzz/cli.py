"""`tandem fuzz`: the bundled pair in float32 and requests at the edge of the schema, or beyond."""

import argparse
import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import bundled
from tandem.arguments import whole

if TYPE_CHECKING:
    from tandem.fuzz.rig import Subject

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    fuzz = argparse.ArgumentParser(
        prog="tandem fuzz",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    fuzz.add_argument("--target", default=bundled.TARGET_NAME, help="a folder or an id")
    fuzz.add_argument("--draft", default=bundled.DRAFT_NAME, help="a folder or an id")
    fuzz.add_argument(
        "--wire", choices=("http", "grpc"), default="http", help="which API the requests are of"
    )
    fuzz.add_argument("--cases", type=whole, default=5000, help="how many requests are sent")
    fuzz.add_argument("--seed", type=int, default=0, help="the same seed draws the same cases")
    fuzz.add_argument(
        "--replay",
        type=Path,
        help="a file with cases as JSON, one a line, which are tried together, instead",
    )
    fuzz.add_argument("--gamma", type=int, default=5, help="the longest draft in a replay")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line per request
    return _fuzz(fuzz.parse_args(arguments))


def _fuzz(options: argparse.Namespace) -> int:
    # imported here, as other commands do without torch
    import torch

    from deployments.router.tokenizer import load_tokenizer
    from tandem.fuzz.grpc_run import replay_calls
    from tandem.fuzz.messages import read_call
    from tandem.fuzz.rig import LOGGERS, Subject
    from tandem.fuzz.run import replay, run_fuzz
    from workers.model import load_model

    torch.set_num_threads(1)
    target, draft = (bundled.resolve(name) for name in (options.target, options.draft))
    subject = Subject(
        target=load_model(target, dtype="float32", device="cpu"),
        draft=load_model(draft, dtype="float32", device="cpu"),
        tokenizer=load_tokenizer(target),
    )
    if options.replay is not None:
        lines = [line for line in options.replay.read_text().splitlines() if line]
        if options.wire == "grpc":
            reason = asyncio.run(replay_calls(subject, list(map(read_call, lines))))
        else:
            reason = asyncio.run(replay(subject, list(map(json.loads, lines)), options.gamma))
        logger.info("%s", reason or f"{len(lines)} cases are as they must be")
        return 1 if reason else 0
    for name in LOGGERS:  # findings say what is wrong
        logging.getLogger(name).propagate = False
    if options.wire == "grpc":
        return _fuzz_grpc(subject, options)
    report = asyncio.run(run_fuzz(subject, num_cases=options.cases, seed=options.seed))
    statuses = ", ".join(f"{n} x {status}" for status, n in sorted(report.statuses.items()))
    logger.info(
        "%d cases: %s; %d drafts accepted; %d findings",
        report.num_cases,
        statuses,
        report.num_accepted,
        len(report.findings),
    )
    return 1 if report.findings else 0


def _fuzz_grpc(subject: "Subject", options: argparse.Namespace) -> int:
    from tandem.fuzz.grpc_run import run_grpc_fuzz

    report = asyncio.run(run_grpc_fuzz(subject, num_calls=options.cases, seed=options.seed))
    codes = ", ".join(f"{n} x {code}" for code, n in sorted(report.codes.items()))
    logger.info("%d calls: %s; %d findings", report.num_calls, codes, len(report.findings))
    return 1 if report.findings else 0
