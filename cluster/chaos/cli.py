"""`python -m cluster chaos`: an app of its own, a load, and a killer."""

import argparse
import asyncio
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

from cluster.bench.arguments import above_zero, temperature, whole
from cluster.bench.client import Load
from cluster.bench.texts import make_prompts
from cluster.demo import bundled

logger = logging.getLogger(__name__)

NUM_PROMPTS = 50
RECOVERY_TIMEOUT_S = 300


def add_chaos(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    chaos = commands.add_parser(
        "chaos", help="kill workers under load and compare every text with its undisturbed one"
    )
    chaos.add_argument("--target", default=bundled.TARGET_NAME)
    chaos.add_argument("--draft", default=bundled.DRAFT_NAME)
    chaos.add_argument("--dtype", default="float32", help="lower ones may differ at near ties")
    for name, default, text in (
        ("--requests", 300, "at least; they go on until all kills are done"),
        ("--kills", 32, "each kind of process as often as the others"),
        ("--concurrency", 16, "streams at a time"),
        ("--max-tokens", 48, "of a completion"),
        ("--ranks", 2, "of a target group (tensor_parallel_size)"),
        ("--groups", 2, "num_target_groups"),
        ("--drafts", 2, "num_draft_replicas"),
    ):
        chaos.add_argument(name, type=whole, default=default, help=text)
    chaos.add_argument("--pause-s", type=above_zero, default=5.0, help="between kills, on average")
    chaos.add_argument("--temperature", type=temperature, default=0.8, help="0 is greedy")
    chaos.add_argument("--seed", type=int, default=0, help="of whom is killed when")
    chaos.add_argument("--output", type=Path, default=Path("bench-results"), help="for the log")
    chaos.set_defaults(run=_chaos)


def _chaos(options: argparse.Namespace) -> int:
    # imported here, as other commands do without Ray
    from cluster.bench.server import live_server
    from cluster.chaos.run import ChaosOptions, format_report, run_chaos
    from cluster.chaos.victims import Victim, Victims

    victims = [victim for victim in Victim if victim is not Victim.OTHER_RANK or options.ranks > 1]
    load = Load(
        prompts=make_prompts("easy", NUM_PROMPTS),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    with live_server(_app_options(options), options.output / "chaos-server.log") as server:
        kill = partial(Victims("default").kill, rng=random.Random(options.seed))
        report = asyncio.run(
            run_chaos(
                server.endpoint,
                load,
                kill,
                ChaosOptions(
                    num_requests=options.requests,
                    num_kills=options.kills,
                    mean_pause_s=options.pause_s,
                    concurrency=options.concurrency,
                    victims=tuple(victims),
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
        "served_model_name": "chaos",
        "tensor_parallel_size": str(options.ranks),
        "num_target_groups": str(options.groups),
        "num_draft_replicas": str(options.drafts),
        "recovery_timeout_s": str(RECOVERY_TIMEOUT_S),
    }
