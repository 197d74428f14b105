"""What would fit instead: other options, other nodes, tried on paper."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cluster.gpu_shares import target_gpu_share
from cluster.plan.fleet import Fleet, Role, lay_out
from cluster.plan.text import count, size
from cluster.topology import Node
from workers.cache_size import GIB

# A change that leaves less of what was asked for is no help.
LEAST_USEFUL_FRACTION = 1 / 8
MAX_MEMORY_GIB = 4096
MAX_REMEDIES = 3
# A draft model is small; of the parts that hold it the first leaves most to the target.
GPU_SHARES = (0.1, 0.2, 0.3, 0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change after which everything fits."""

    change: str
    details: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """What the target would be with another tensor_parallel_size."""

    allowed: Sequence[int]
    """The sizes that the model can have."""
    resize: Callable[[int], Role]


def find_remedies(fleet: Fleet, target_sizes: TargetSizes) -> list[Remedy]:
    """The changes that make the fleet fit, the most useful first, at most MAX_REMEDIES."""
    tries: tuple[Callable[[], Remedy | None], ...] = (
        lambda: _other_gpu_shares(fleet),
        lambda: _larger_groups(fleet, target_sizes),
        lambda: _shorter_sequences(fleet),
        lambda: _other_cache(fleet),
        lambda: _more_nodes(fleet),
        lambda: _fewer_drafts(fleet),
        lambda: _fewer_groups(fleet),
        lambda: _fewer_sequences(fleet),
        lambda: _smaller_groups(fleet, target_sizes),
        lambda: _larger_groups_on_more_nodes(fleet, target_sizes),
        lambda: _more_memory(fleet),
    )
    found: list[Remedy] = []
    for find in tries:
        remedy = find()
        if remedy is not None:
            found.append(remedy)
        if len(found) == MAX_REMEDIES:
            break
    return found


def _other_gpu_shares(fleet: Fleet) -> Remedy | None:
    """A draft replica and a rank of the target on one GPU, or another part of it for the draft."""
    if not fleet.target.on_gpu or len(fleet.roles) == 1:
        return None
    for share in GPU_SHARES:
        parts = (target_gpu_share(share), share)
        roles = zip(fleet.roles, parts, strict=True)
        if _fits(replace(fleet, roles=tuple(role.with_gpus(part) for role, part in roles))):
            details = " (a draft replica beside a rank of the target)"
            return Remedy(change=f"draft_gpu_share={share:g}", details=details)
    return None


def _larger_groups(fleet: Fleet, target_sizes: TargetSizes) -> Remedy | None:
    others = _with_larger_groups(fleet, target_sizes)
    return next((_regrouped(other) for other in others if _fits(other)), None)


def _larger_groups_on_more_nodes(fleet: Fleet, target_sizes: TargetSizes) -> Remedy | None:
    if _more_nodes(fleet) is not None or _larger_groups(fleet, target_sizes) is not None:
        return None  # it does not take both
    for other in _with_larger_groups(fleet, target_sizes):
        more = _more_nodes(other)
        if more is not None:
            tp_size = other.target.size.tp_size
            return Remedy(change=f"tensor_parallel_size={tp_size} with {more.change}")
    return None


def _with_larger_groups(fleet: Fleet, target_sizes: TargetSizes) -> Iterator[Fleet]:
    for tp_size in target_sizes.allowed:
        if tp_size > fleet.target.size.tp_size:
            yield fleet.with_target(target_sizes.resize(tp_size))


def _smaller_groups(fleet: Fleet, target_sizes: TargetSizes) -> Remedy | None:
    sizes = [n for n in target_sizes.allowed if n < fleet.target.size.tp_size]
    others = (fleet.with_target(target_sizes.resize(n)) for n in reversed(sizes))
    return next((_regrouped(other) for other in others if _fits(other)), None)


def _regrouped(fleet: Fleet) -> Remedy:
    target = fleet.target.size
    num_tokens = lay_out(fleet).caches["target 0"].num_tokens
    return Remedy(
        change=f"tensor_parallel_size={target.tp_size}",
        details=f" ({size(target.weight_bytes)} of weights, room for {num_tokens:,} tokens)",
    )


def _shorter_sequences(fleet: Fleet) -> Remedy | None:
    """A shorter max_model_len, where one was asked for; else the workers choose one that fits."""
    block_size, asked = fleet.target.block_size, fleet.target.max_model_len
    if not fleet.target.must_hold_sequence:
        return None

    def with_length(num_blocks: int) -> Fleet:
        length = num_blocks * block_size
        return fleet.with_roles(lambda r: replace(r, max_model_len=min(r.max_model_len, length)))

    num_blocks = _most(asked // block_size, lambda n: _fits(with_length(n)))
    return Remedy(change=f"max_model_len={num_blocks * block_size}") if num_blocks else None


def _other_cache(fleet: Fleet) -> Remedy | None:
    target, taken = fleet.target, fleet.target.kv_cache_bytes
    if taken is None:
        taken = max((cache.num_bytes for cache in lay_out(fleet).caches.values()), default=0)
    elif _fits(fleet.with_target(replace(target, kv_cache_bytes=None))):
        return Remedy(change="leaving out kv_cache_gib")
    tenth = GIB // 10
    tenths = _most(
        taken // tenth,
        lambda n: _fits(fleet.with_target(replace(target, kv_cache_bytes=n * tenth))),
    )
    return Remedy(change=f"kv_cache_gib={tenths / 10:g}") if tenths else None


def _fewer_drafts(fleet: Fleet) -> Remedy | None:
    if len(fleet.roles) == 1:
        return None
    target, draft = fleet.roles
    most = _most(
        draft.num_groups - 1,
        lambda n: _fits(replace(fleet, roles=(target, replace(draft, num_groups=n)))),
    )
    return Remedy(change=f"num_draft_replicas={most}") if most else None


def _fewer_groups(fleet: Fleet) -> Remedy | None:
    target = fleet.target
    most = _most(
        target.num_groups - 1,
        lambda n: _fits(fleet.with_target(replace(target, num_groups=n))),
    )
    return Remedy(change=f"num_target_groups={most}") if most else None


def _fewer_sequences(fleet: Fleet) -> Remedy | None:
    most = _most(
        fleet.target.max_num_seqs - 1,
        lambda n: _fits(fleet.with_roles(lambda role: replace(role, max_num_seqs=n))),
    )
    return Remedy(change=f"max_num_seqs={most}") if most else None


def _more_nodes(fleet: Fleet) -> Remedy | None:
    """The kind of nodes of which fewest more are needed."""
    most = sum(role.num_groups * role.size.tp_size for role in fleet.roles)
    kinds = {node.kind: node for node in fleet.nodes}
    needed: dict[str, int] = {}
    for kind, node in kinds.items():
        num_more = _least(range(1, most + 1), partial(_fits_with_more, fleet, node))
        if num_more is not None:
            needed[kind] = num_more
    if not needed:
        return None
    kind = min(needed, key=lambda kind: needed[kind])
    return Remedy(change=f"{count(needed[kind], 'more node')} of {kind}")


def _fits_with_more(fleet: Fleet, node: Node, number: int) -> bool:
    added = tuple(replace(node, name=f"{node.name} more {n}") for n in range(number))
    return _fits(replace(fleet, nodes=fleet.nodes + added))


def _more_memory(fleet: Fleet) -> Remedy | None:
    on_gpu = fleet.target.on_gpu
    what = "GPUs of at least {} GiB" if on_gpu else "nodes of at least {} GiB of memory"

    def with_memory(num_gib: int) -> Fleet:
        def enlarged(node: Node) -> Node:
            num_bytes = num_gib * GIB
            if on_gpu:
                return replace(node, gpu_memory_bytes=max(num_bytes, node.gpu_memory_bytes))
            return replace(node, memory_bytes=max(num_bytes, node.memory_bytes))

        return replace(fleet, nodes=tuple(map(enlarged, fleet.nodes)))

    num_gib = _least(range(1, MAX_MEMORY_GIB), lambda n: _fits(with_memory(n)))
    return Remedy(change=what.format(num_gib)) if num_gib is not None else None


def _fits(fleet: Fleet) -> bool:
    return lay_out(fleet).fits


def _most(asked: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number up to `asked` that fits, if that is a useful part of it."""
    numbers = range(max(1, int(asked * LEAST_USEFUL_FRACTION)), asked + 1)
    num_fitting = bisect_left(numbers, True, key=lambda n: not fits(n))
    return numbers[num_fitting - 1] if num_fitting else None


def _least(numbers: range, fits: Callable[[int], bool]) -> int | None:
    """The smallest of the numbers that fits, if any; all larger ones fit too."""
    index = bisect_left(numbers, True, key=fits)
    return numbers[index] if index < len(numbers) else None
