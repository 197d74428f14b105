"""From a plan's config to the plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from cluster import bundled
from cluster.gpu_shares import target_gpu_share
from cluster.model_files import check_found
from cluster.options import AppArgs, parse_options
from cluster.placement import GroupBundles, group_bundles, rank_resources, tensor_parallel_sizes
from cluster.plan.advice import notes, problems
from cluster.plan.config import PlanConfig
from cluster.plan.fleet import Fleet, Layout, Role, lay_out
from cluster.plan.model_size import size_draft, size_model
from cluster.plan.remedies import TargetSizes
from cluster.topology import Node
from workers.cache_size import GIB
from workers.errors import ConfigError
from workers.model import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placed fleet with its memory, and whether that fits."""

    fleet: Fleet
    layout: Layout
    bundles: GroupBundles
    """The bundles that each target group asks Ray for."""
    problems: tuple[str, ...]
    """Sentences about what does not fit; empty if all does."""
    notes: tuple[str, ...]


def make_plan(config: PlanConfig) -> Plan:
    """Size the models and place everything; raises ConfigError for what could never be served."""
    args, nodes = config.args, config.all_nodes()
    for source in (args.target_source, args.draft_source):
        if source is not None:
            check_found(bundled.resolve(source))

    @cache
    def resize(tp_size: int) -> Role:
        return _target(args, nodes, tp_size)

    target = resize(args.tensor_parallel_size)
    draft = _draft(args, nodes)
    fleet = Fleet(roles=(target, draft) if draft else (target,), nodes=nodes)
    layout = lay_out(fleet)
    allowed = _tensor_parallel_sizes(args)
    return Plan(
        fleet=fleet,
        layout=layout,
        bundles=group_bundles(
            tp_size=args.tensor_parallel_size, resources=target.resources, nodes=nodes
        ),
        problems=tuple(problems(fleet, layout, TargetSizes(allowed=allowed, resize=resize))),
        notes=tuple(notes(fleet, layout)),
    )


def _tensor_parallel_sizes(args: AppArgs) -> list[int]:
    """The numbers of ranks that the target can have with these options."""
    sizes = tensor_parallel_sizes(load_config(bundled.resolve(args.target_source)))
    return [
        tp_size
        for tp_size in sizes
        if _are_options({**dict(args), "tensor_parallel_size": tp_size})
    ]


def _are_options(values: Mapping[str, Any]) -> bool:
    try:
        parse_options(values)
    except ConfigError:
        return False
    return True


def _target(args: AppArgs, nodes: tuple[Node, ...], tp_size: int) -> Role:
    resources = rank_resources(args.device, nodes, target_gpu_share(args.draft_gpu_share))
    size = size_model(
        args.target_source,
        dtype=args.dtype,
        tp_size=tp_size,
        on_gpu=resources.num_gpus > 0,
        quantization=args.quantization,
    )
    asked = args.max_model_len
    if asked is not None and asked > size.max_position:
        raise ConfigError(
            f"max_model_len is {asked}, but {args.target!r} has positions for {size.max_position} "
            "tokens only; use at most that"
        )
    return Role(
        name="target",
        size=size,
        num_groups=args.num_target_groups.maximum,
        resources=resources,
        max_model_len=asked or size.max_position,
        must_hold_sequence=asked is not None,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        kv_cache_bytes=None if args.kv_cache_gib is None else round(args.kv_cache_gib * GIB),
    )


def _draft(args: AppArgs, nodes: tuple[Node, ...]) -> Role | None:
    if args.draft_source is None:
        return None
    resources = rank_resources(args.device, nodes, args.draft_gpu_share)
    size = size_draft(
        args.draft_source,
        dtype=args.dtype,
        on_gpu=resources.num_gpus > 0,
        quantization=args.draft_quantization,
    )
    return Role(
        name="draft",
        size=size,
        num_groups=args.num_draft_replicas.maximum,
        resources=resources,
        # a draft with the shorter context serves until it ends
        max_model_len=min(args.max_model_len or size.max_position, size.max_position),
        must_hold_sequence=args.max_model_len is not None,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
    )
