"""`tandem plan <config.yaml>`."""

import argparse
import logging
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

logger = logging.getLogger(__name__)

DOES_NOT_FIT = 1
BAD_CONFIG = 2


def add_plan(commands: Any) -> None:
    """`commands`: what `add_subparsers` returns; argparse keeps its type to itself."""
    plan = commands.add_parser(
        "plan",
        help="what would run where, and whether it fits",
        description="What would run where, with which memory, and whether it fits. Needs no "
        "cluster, and of the models only config.json. The exit status is 0 if all fits, "
        f"{DOES_NOT_FIT} if not, and {BAD_CONFIG} if the file is wrong.",
    )
    plan.add_argument(
        "config", type=Path, help="a YAML file with args: (or Serve's applications:) and nodes:"
    )
    plan.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    # imported where it is used: transformers takes seconds
    from cluster.plan.config import load_plan_config
    from cluster.plan.planning import make_plan
    from cluster.plan.tables import format_plan

    try:
        plan = make_plan(load_plan_config(options.config))
    except ConfigError as error:
        logger.error("%s", error)
        return BAD_CONFIG
    logger.info("%s", format_plan(plan))
    return DOES_NOT_FIT if plan.problems else 0
