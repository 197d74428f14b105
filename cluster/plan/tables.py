"""A plan as text that is Markdown too."""

import json
from itertools import groupby

from cluster.plan.fleet import Layout, Role, memory_bytes
from cluster.plan.planning import Plan
from cluster.plan.text import size
from cluster.topology import Node
from workers.cache_size import PROCESS_BYTES

MEMORY_COLUMNS = (
    "worker",
    "model",
    "weights",
    "per token",
    "KV cache",
    "blocks",
    "tokens",
    "in all",
    "of",
)


def format_plan(plan: Plan) -> str:
    """Two tables, memory and places, and the sentences."""
    parts = [_memory_table(plan), _place_table(plan), *_bundles(plan)]
    parts += [f"Does not fit: {problem}." for problem in plan.problems]
    parts += [f"Note: {note}." for note in plan.notes]
    if not plan.problems:
        parts.append("All of it fits.")
    return "\n\n".join(parts)


def _memory_table(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [MEMORY_COLUMNS]
    for role in plan.fleet.roles:
        rows += _memory_rows(role, plan.layout)
    own = size(PROCESS_BYTES)
    title = f"Memory of each rank; of what it takes in all, {own} are its process's own:"
    return f"{title}\n\n{_markdown(rows, num_left=2)}"


def _memory_rows(role: Role, layout: Layout) -> list[tuple[str, ...]]:
    """One row for all groups with the same memory; without a cache where there is no place."""
    model = f"{role.size.name} in {role.size.precision}"
    shares = [size(role.size.weight_bytes), size(role.size.slot_bytes)]
    found: dict[tuple[str, ...], list[str]] = {}
    for name, cache in layout.caches.items():
        if cache.role is role:
            node = min(layout.placement.nodes[name], key=lambda node: memory_bytes(role, node))
            cells = (
                size(cache.num_bytes),
                f"{cache.num_blocks:,}",
                f"{cache.num_tokens:,}",
                size(cache.rank_bytes),
                size(memory_bytes(role, node)),
            )
            found.setdefault(cells, []).append(name)
    if not found:
        return [(_named(role, role.num_groups), model, *shares, "", "", "", "", "")]
    return [(_named(role, len(names)), model, *shares, *cells) for cells, names in found.items()]


def _named(role: Role, number: int) -> str:
    ranks = f" of {role.size.tp_size} ranks" if role.size.tp_size > 1 else ""
    return f"{number} x {role.name}{ranks}"


def _place_table(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [("node", "runs", "GPUs", "cores")]
    for node in plan.fleet.nodes:
        ranks = [
            (name, rank)
            for name, homes in plan.layout.placement.nodes.items()
            for rank, home in enumerate(homes)
            if home is node
        ]
        runs = [
            _ranks(plan, name, [rank for _, rank in members])
            for name, members in groupby(ranks, key=lambda member: member[0])
        ]
        gpus = f"{_num_gpus_taken(plan, node):g} of {node.num_gpus:g}" if node.num_gpus else ""
        rows.append((node.name, ", ".join(runs), gpus, f"{node.num_cpus:g}"))
    return "Places:\n\n" + _markdown(rows, num_left=2)


def _ranks(plan: Plan, name: str, ranks: list[int]) -> str:
    if len(plan.layout.placement.nodes[name]) == 1:
        return name
    return f"{name} (ranks {ranks[0]}-{ranks[-1]})" if ranks[1:] else f"{name} (rank {ranks[0]})"


def _num_gpus_taken(plan: Plan, node: Node) -> float:
    return sum(
        plan.layout.caches[name].role.resources.num_gpus * homes.count(node)
        for name, homes in plan.layout.placement.nodes.items()
    )


def _bundles(plan: Plan) -> list[str]:
    """A sentence about the bundles of a group, where it has several."""
    bundles = plan.bundles.bundles
    if len(bundles) == 1:
        return []
    each = f"{len(bundles)} bundles of {json.dumps(bundles[0])}"
    return [f"Each target group asks Ray for {each}, {plan.bundles.strategy}."]


def _markdown(rows: list[tuple[str, ...]], *, num_left: int) -> str:
    """A table whose columns stand under each other in a terminal too.

    Args:
        num_left: columns of text; the others are numbers.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    marks = tuple(
        "-" * width if column < num_left else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    )
    lines = []
    for row in (rows[0], marks, *rows[1:]):
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
