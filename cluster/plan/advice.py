"""A plan in sentences: what does not fit and what would, and what is worth knowing."""

from collections import Counter
from collections.abc import Sequence

from cluster.gpu_shares import GPU_PARTS
from cluster.placement import Group, group_bundles, place
from cluster.plan.fleet import Fleet, GroupCache, Layout, Role, memory_bytes
from cluster.plan.remedies import TargetSizes, find_remedies
from cluster.plan.text import count, listed, part_of_gpu, size
from cluster.topology import Node
from workers.cache_size import GIB


def problems(fleet: Fleet, layout: Layout, target_sizes: TargetSizes) -> list[str]:
    """A sentence for each thing that does not fit, the last with what would; none if all does."""
    too_large = [role for role in fleet.roles if _is_too_large(role, fleet.nodes)]
    if too_large:
        found = [_too_large(role, fleet.nodes) for role in too_large]
    elif layout.placement.unplaced:
        found = [_no_room(fleet, layout.placement.unplaced)]
    else:
        found = _small_caches(layout) + _overfull_nodes(layout)
    if not found:
        return []
    remedies = find_remedies(fleet, target_sizes)
    advice = "no single change would fit"
    if remedies:
        advice = f"{remedies[0].change} would fit{remedies[0].details}"
    if remedies[1:]:
        advice += f", and so would {listed([r.change for r in remedies[1:]], last='or')}"
    return [*found[:-1], f"{found[-1]}; {advice}"]


def _is_too_large(role: Role, nodes: Sequence[Node]) -> bool:
    """Whether no node could take even one rank."""
    return not any(role.rank_fits(node) for node in _hosts(role, nodes))


def _hosts(role: Role, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that a rank could be on, were it small enough."""
    return [node for node in nodes if node.num_gpus or not role.on_gpu]


def _too_large(role: Role, nodes: Sequence[Node]) -> str:
    host = max(_hosts(role, nodes), key=lambda node: memory_bytes(role, node))
    home = part_of_gpu(role.resources.num_gpus) if role.on_gpu else "a node"
    where = f"{home} of {host.kind}"
    memory = memory_bytes(role, host)
    weights = f"one rank of the {role.name} needs {size(role.size.weight_bytes)} of weights"
    free = memory - role.fixed_bytes
    if free <= 0:
        process_bytes = role.fixed_bytes - role.size.weight_bytes
        if role.size.weight_bytes < memory:
            weights += f", {size(process_bytes)} for its process,"
        return f"{weights} and {where} has {size(memory)}"
    least = f"one sequence of max_model_len={role.max_model_len}"
    if not role.must_hold_sequence:
        least = f"one block of {role.block_size} tokens"
    least += f" takes {size(role.least_cache_bytes)}"
    if role.kv_cache_bytes is None:
        left = f"{size(free * role.free_fraction)} of {where} ({size(memory)})"
        return f"{weights}, which leaves {left} for its KV cache, and {least}"
    asked = f"kv_cache_gib={role.kv_cache_bytes / GIB:g}"
    if role.cache_bytes(free) < role.least_cache_bytes:
        return f"a rank of the {role.name} is given {asked}, and {least}"
    cache = size(role.cache_bytes(free))
    return f"{weights} and {cache} for its KV cache ({asked}), and {where} has {size(memory)}"


def _no_room(fleet: Fleet, unplaced: Sequence[Group]) -> str:
    """Too few GPUs, or too far apart, or too little main memory."""
    wanted = listed([_demand(role) for role in fleet.roles])
    parts = sum(r.num_groups * r.size.tp_size * r.resources.gpu_parts for r in fleet.roles)
    num_wanted = parts / GPU_PARTS
    num_gpus = sum(node.num_gpus for node in fleet.nodes)
    if fleet.target.on_gpu and num_gpus < num_wanted:
        nodes = "node has" if len(fleet.nodes) == 1 else "nodes have"
        return f"the {nodes} {count(num_gpus, 'GPU')} and the plan needs {num_wanted:g}: {wanted}"
    return f"the plan needs {wanted}, and {unplaced[0].name} finds no {_home(fleet, unplaced[0])}"


def _home(fleet: Fleet, group: Group) -> str:
    """The place that a group needs, in words."""
    number, memory = group.num_ranks, size(group.rank_bytes)
    if not fleet.target.on_gpu:
        return f"node with {'' if number == 1 else f'{number} times '}{memory} of memory left"
    asked = group_bundles(tp_size=number, resources=group.resources, nodes=fleet.nodes)
    where = " on one node" if number > 1 and asked.strategy == "STRICT_PACK" else ""
    gpus, part = count(number, "GPU"), group.resources.num_gpus
    if part < 1:
        gpus = part_of_gpu(part) if number == 1 else f"{number} times {part_of_gpu(part)}"
    return f"{gpus} with {memory} of memory{where}"


def _demand(role: Role) -> str:
    part = role.resources.num_gpus
    each = f" ({part_of_gpu(part)} each)" if role.on_gpu and part < 1 else ""
    if role.name == "draft":
        return count(role.num_groups, "draft replica") + each
    ranks = "" if role.size.tp_size == 1 else f" of {count(role.size.tp_size, 'rank')}"
    return f"{count(role.num_groups, 'target group')}{ranks}{each}"


def _small_caches(layout: Layout) -> list[str]:
    """A sentence for each cache that gets less than it needs beside what else runs on its node."""
    return [
        f"{name} gets a KV cache of {cache.num_tokens:,} tokens beside what else runs on "
        f"{layout.placement.nodes[name][0].name}, less than one sequence of "
        f"max_model_len={cache.role.max_model_len}"
        for name, cache in layout.caches.items()
        if not cache.is_enough
    ]


def _overfull_nodes(layout: Layout) -> list[str]:
    return [
        f"the workers on {node.name} would take {size(num_bytes)}, and it has "
        f"{size(node.memory_bytes)} of memory"
        for node, num_bytes in layout.overfull.items()
    ]


def notes(fleet: Fleet, layout: Layout) -> list[str]:
    """Sentences worth knowing about a plan, whether it fits or not."""
    found = [remark for role in fleet.roles for remark in role.size.remarks]
    for role in fleet.roles:
        caches = [cache for cache in layout.caches.values() if cache.role is role]
        if caches:
            found += _capacity(role, min(caches, key=lambda cache: cache.num_blocks))
        found += _unsuitable_gpus(role, fleet.nodes)
    found += _spread_groups(layout) + _shared_cores(layout)
    if layout.fits and _depends_on_order(fleet):
        found.append(
            "this fits if the target groups are placed before the draft replicas, which Serve does "
            "not promise; with RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1 it places the largest first"
        )
    return found


def _capacity(role: Role, cache: GroupCache) -> list[str]:
    num_sequences = cache.num_blocks // role.blocks_per_sequence
    if num_sequences >= role.max_num_seqs or not cache.is_enough:
        return []
    holder = "target group" if role.name == "target" else "draft replica"
    if num_sequences == 0:
        return [
            f"the KV cache of a {holder} holds {cache.num_tokens:,} tokens, less than the "
            f"{role.max_model_len:,} that the model allows: sequences end there; "
            f"max_model_len={cache.num_tokens} says so"
        ]
    length = cache.num_blocks // role.max_num_seqs * role.block_size
    return [
        f"the KV cache of a {holder} holds {count(num_sequences, 'sequence')} of "
        f"max_model_len={role.max_model_len} ({cache.num_tokens:,} tokens), less than "
        f"max_num_seqs={role.max_num_seqs}: when it is full, the youngest give way and are run "
        f"again; {role.max_num_seqs} sequences fit up to {length:,} tokens each"
    ]


def _unsuitable_gpus(role: Role, nodes: Sequence[Node]) -> list[str]:
    kinds = {node.kind: role.rank_fits(node) for node in _hosts(role, nodes)}
    if not role.on_gpu or all(kinds.values()) or not any(kinds.values()):
        return []
    good = listed([kind for kind, fits in kinds.items() if fits])
    bad = listed([kind for kind, fits in kinds.items() if not fits])
    return [
        f"the {role.name} fits the GPUs of {good}, not those of {bad}; Ray counts GPUs, not their "
        "memory, and may choose those"
    ]


def _spread_groups(layout: Layout) -> list[str]:
    widths = {name: len({*nodes}) for name, nodes in layout.placement.nodes.items()}
    spread = [name for name, width in widths.items() if width > 1]
    if not spread:
        return []
    verb = "is" if len(spread) == 1 else "are"
    return [
        f"{listed(spread)} {verb} spread over {max(widths.values())} nodes, as none has room for a "
        "whole group: what the layers exchange goes over the network between them"
    ]


def _shared_cores(layout: Layout) -> list[str]:
    homes = [
        node
        for name, nodes in layout.placement.nodes.items()
        for node in nodes
        if not layout.caches[name].role.on_gpu
    ]
    return [
        f"{count(number, 'worker')} share the {count(node.num_cpus, 'core')} of {node.name}, and "
        "slow each other down"
        for node, number in Counter(homes).items()
        if number > node.num_cpus
    ]


def _depends_on_order(fleet: Fleet) -> bool:
    """Whether replicas of the draft, placed first, would leave no room for a target group."""
    groups = [group for role in reversed(fleet.roles) for group in role.groups()]
    return bool(place(groups, fleet.nodes).unplaced)
