"""Nodes, and plans of them."""

from pathlib import Path

import yaml

from cluster.plan.config import PlanConfig
from cluster.plan.planning import Plan, make_plan

EIGHT_H100 = {
    "name": "h100",
    "num_cpus": 96,
    "memory_gib": 1000,
    "num_gpus": 8,
    "gpu_memory_gib": 80,
}
ONE_H100 = {**EIGHT_H100, "num_gpus": 1}
LAPTOP = {"name": "laptop", "num_cpus": 4, "memory_gib": 8}


def write(folder: Path, content: object) -> Path:
    path = folder / "plan.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def make_plan_of(args: dict[str, object], *nodes: dict[str, object]) -> Plan:
    return make_plan(PlanConfig.model_validate({"args": args, "nodes": list(nodes)}))


def problem(args: dict[str, object], *nodes: dict[str, object]) -> str:
    """The one sentence about what does not fit."""
    (sentence,) = make_plan_of(args, *nodes).problems
    return sentence
