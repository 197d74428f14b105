"""`tandem chaos`: an app of its own, a load, and what befalls its processes."""

import argparse
import asyncio
import logging
from pathlib import Path
from typing import Any

from cluster import bundled
from tandem.arguments import above_zero, temperature, whole
from tandem.chaos.events import Blow, kinds_of_events
from tandem.live.client import Load
from tandem.live.texts import make_prompts

logger = logging.getLogger(__name__)

NUM_PROMPTS = 50
RECOVERY_TIMEOUT_S = 300
VERIFY_TIMEOUT_S = 30
"""Shorter than the app's default: a hanging target is left earlier, for another."""
MODEL_NAME = "chaos"


def add_chaos(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    chaos = commands.add_parser(
        "chaos",
        help="kill and stop processes under load and compare every text with its undisturbed one",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    chaos.add_argument("--target", default=bundled.TARGET_NAME, help="a folder or an id")
    chaos.add_argument("--draft", default=bundled.DRAFT_NAME, help="a folder or an id")
    chaos.add_argument("--dtype", default="float32", help="lower ones may differ at near ties")
    for name, default, text in (
        ("--requests", 300, "requests at least; they go on until all events are over"),
        ("--events", 44, "events, each kind as often as the others"),
        ("--concurrency", 16, "streams at a time"),
        ("--max-tokens", 48, "tokens of a completion"),
        ("--ranks", 2, "ranks of a target group (tensor_parallel_size)"),
        ("--groups", 2, "target groups (num_target_groups)"),
        ("--drafts", 2, "drafters (num_draft_replicas)"),
    ):
        chaos.add_argument(name, type=whole, default=default, help=text)
    chaos.add_argument("--pause-s", type=above_zero, default=5.0, help="seconds between events")
    chaos.add_argument("--temperature", type=temperature, default=0.8, help="0 is greedy")
    chaos.add_argument("--seed", type=int, default=0, help="the seed of what befalls whom when")
    chaos.add_argument(
        "--blows",
        nargs="+",
        choices=[blow.name.lower() for blow in Blow],
        default=[blow.name.lower() for blow in Blow],
        help="pause: stopped, and going on after a while; hang: stopped, and left to the watchdogs",
    )
    chaos.add_argument("--no-poison", action="store_true", help="send no hostile requests beside")
    chaos.add_argument(
        "--output", type=Path, default=Path("bench-results"), help="the log's folder"
    )
    chaos.set_defaults(run=_chaos)


def _chaos(options: argparse.Namespace) -> int:
    # imported here, as other commands do without Ray
    from tandem.chaos.poison import make_poisons
    from tandem.chaos.report import format_report
    from tandem.chaos.run import ChaosOptions, run_chaos
    from tandem.chaos.victims import Victims
    from tandem.live.server import live_server

    load = Load(
        prompts=make_prompts("easy", NUM_PROMPTS),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    with live_server(_app_options(options), options.output / "chaos-server.log") as server:
        processes = Victims("default")
        info = processes.target_info()
        poisons = make_poisons(
            MODEL_NAME, vocab_size=info.vocab_size, max_model_len=info.max_model_len
        )
        report = asyncio.run(
            run_chaos(
                server.endpoint,
                load,
                processes,
                ChaosOptions(
                    num_requests=options.requests,
                    num_events=options.events,
                    mean_pause_s=options.pause_s,
                    concurrency=options.concurrency,
                    kinds=kinds_of_events(
                        num_ranks=options.ranks,
                        blows=[Blow[name.upper()] for name in options.blows],
                    ),
                    poisons=() if options.no_poison else poisons,
                    seed=options.seed,
                ),
            )
        )
    logger.info("%s", format_report(report))
    return 0 if report.is_good else 1


def _app_options(options: argparse.Namespace) -> dict[str, str]:
    return {
        "target": options.target,
        "draft": options.draft,
        "dtype": options.dtype,
        "served_model_name": MODEL_NAME,
        "tensor_parallel_size": str(options.ranks),
        "num_target_groups": str(options.groups),
        "num_draft_replicas": str(options.drafts),
        "recovery_timeout_s": str(RECOVERY_TIMEOUT_S),
        "verify_timeout_s": str(VERIFY_TIMEOUT_S),
    }
