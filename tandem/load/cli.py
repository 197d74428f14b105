"""`tandem load`: an app of its own with two API keys, of which one floods it."""

import argparse
import logging
import secrets
from pathlib import Path
from typing import Any

import yaml

from cluster import bundled
from tandem.arguments import above_zero, whole
from tandem.live.client import Load
from tandem.live.texts import make_prompts

logger = logging.getLogger(__name__)

NUM_PROMPTS = 20
MODEL_NAME = "load"


def add_load(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    load = commands.add_parser(
        "load", help="flood an app with one API key and see what another one notices"
    )
    load.add_argument("--target", default=bundled.TARGET_NAME)
    load.add_argument("--draft", default=bundled.DRAFT_NAME)
    load.add_argument("--dtype", default="float32", help="lower ones may differ at near ties")
    for name, default, text in (
        ("--streams", 200, "of the flood, at a time"),
        ("--max-tokens", 48, "of a completion"),
        ("--max-num-seqs", 64, "completions that run at a time"),
        ("--max-queued-requests", 1024, "completions that wait"),
        ("--alone", 40, "requests of the quiet key before the flood"),
        ("--cancels", 200, "clients that leave, over HTTP and as many over gRPC"),
        ("--at-once", 10, "of them at a time"),
    ):
        load.add_argument(name, type=whole, default=default, help=text)
    load.add_argument("--duration-s", type=above_zero, default=300.0, help="of the flood")
    load.add_argument("--hang-ups", type=float, default=0.2, help="share of the flood's streams")
    load.add_argument("--slow", type=float, default=0.1, help="share of readers that are slow")
    load.add_argument("--max-concurrent", type=whole, help="the flood's key: completions at a time")
    load.add_argument("--output", type=Path, default=Path("bench-results"), help="for log and keys")
    load.set_defaults(run=_load)


def _load(options: argparse.Namespace) -> None:
    # imported here, as other commands do without Ray
    from tandem.live.server import live_server
    from tandem.load.flood import FloodOptions
    from tandem.load.run import LoadOptions, format_report, run_load

    options.output.mkdir(parents=True, exist_ok=True)
    quiet, flood = (f"sk-{secrets.token_hex(16)}" for _ in range(2))
    key_file = options.output / "load-keys.yaml"
    loud = {"name": "flood", "key": flood, "max_concurrent": options.max_concurrent}
    key_file.write_text(yaml.safe_dump({"keys": [{"name": "quiet", "key": quiet}, loud]}))
    load = Load(
        prompts=make_prompts("easy", NUM_PROMPTS), max_tokens=options.max_tokens, temperature=0.0
    )
    with live_server(_app_options(options, key_file), options.output / "load.log") as server:
        report = run_load(
            server,
            load,
            LoadOptions(
                quiet_key=quiet,
                flood_key=flood,
                flood=FloodOptions(
                    num_streams=options.streams,
                    duration_s=options.duration_s,
                    hang_up_share=options.hang_ups,
                    slow_share=options.slow,
                ),
                num_alone=options.alone,
                num_cancels=options.cancels,
                num_at_once=options.at_once,
            ),
        )
    logger.info("%s", format_report(report))


def _app_options(options: argparse.Namespace, key_file: Path) -> dict[str, str]:
    return {
        "target": options.target,
        "draft": options.draft,
        "dtype": options.dtype,
        "served_model_name": MODEL_NAME,
        "max_num_seqs": str(options.max_num_seqs),
        "max_queued_requests": str(options.max_queued_requests),
        "api_keys_file": str(key_file.absolute()),
    }
