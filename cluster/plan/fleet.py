"""Everything that is to run, and the places and the memory that it gets on the nodes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.placement import Group, Placement, RankResources, place
from cluster.plan.model_size import ModelSize
from cluster.topology import Node
from workers.cache_size import PROCESS_BYTES, CacheNeeds, CacheShares, share_cache
from workers.paged_model import FREE_MEMORY_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The target or the draft: groups that are alike."""

    name: str
    """`target` or `draft`."""
    size: ModelSize
    num_groups: int
    resources: RankResources
    """Cores and GPUs of each rank."""
    max_model_len: int
    """Tokens of the longest sequence."""
    must_hold_sequence: bool
    """Whether the cache must hold a sequence of max_model_len tokens. If not, max_model_len is
    lowered to what the cache holds."""
    max_num_seqs: int
    block_size: int
    kv_cache_bytes: int | None = None
    """Bytes of each rank's cache; None takes a share of the memory that is free."""

    @property
    def on_gpu(self) -> bool:
        return self.resources.num_gpus > 0

    @property
    def free_fraction(self) -> float:
        """The share of free memory that a cache takes, as the workers decide it."""
        return FREE_MEMORY_FRACTION["cuda" if self.on_gpu else "cpu"]

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.size.slot_bytes

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def needs(self) -> CacheNeeds:
        return CacheNeeds(
            block_bytes=self.block_bytes,
            blocks_per_sequence=self.blocks_per_sequence,
            state_bytes=self.size.state_bytes,
            max_num_seqs=self.max_num_seqs,
        )

    @property
    def least_cache_bytes(self) -> int:
        """The least cache that can serve."""
        if self.must_hold_sequence:
            return self.needs.least_bytes
        return self.needs.states_bytes(1) + self.block_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes that a rank takes before it has a cache."""
        return self.size.weight_bytes + PROCESS_BYTES

    @property
    def least_bytes(self) -> int:
        """The least memory of a GPU for a rank, or the least that a rank takes of its node's."""
        if self.kv_cache_bytes is not None:
            return self.fixed_bytes + self.cache_bytes(0)
        needed = self.least_cache_bytes / (self.free_fraction if self.on_gpu else 1)
        return self.fixed_bytes + round(needed)

    def shares(self, free_bytes: int) -> CacheShares:
        """The cache of a rank that finds so much free memory, as `workers.paged_model` decides."""
        cache_bytes = self.kv_cache_bytes
        if cache_bytes is None:
            cache_bytes = int(max(free_bytes, 0) * self.free_fraction)
        return share_cache(cache_bytes, self.needs)

    def cache_bytes(self, free_bytes: int) -> int:
        return self.bytes_of(self.shares(free_bytes))

    def bytes_of(self, shares: CacheShares) -> int:
        return shares.num_blocks * self.block_bytes + self.needs.states_bytes(shares.num_states)

    def rank_fits(self, node: Node) -> bool:
        """Whether a rank has enough memory on the node, if nothing else runs there."""
        memory = memory_bytes(self, node)
        is_held = self.cache_bytes(memory - self.fixed_bytes) >= self.least_cache_bytes
        return is_held and self.least_bytes <= memory

    def with_gpus(self, num_gpus: float) -> "Role":
        return replace(self, resources=replace(self.resources, num_gpus=num_gpus))

    def groups(self) -> Iterator[Group]:
        for index in range(self.num_groups):
            yield Group(
                name=f"{self.name} {index}",
                num_ranks=self.size.tp_size,
                resources=self.resources,
                rank_bytes=self.least_bytes,
            )


def memory_bytes(role: Role, node: Node) -> int:
    """The memory that a rank lives in: its part of a GPU, or the node's, which it shares."""
    return role.resources.gpu_memory_bytes(node) if role.on_gpu else node.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Everything that is to run, and the nodes."""

    roles: tuple[Role, ...]
    """The target, and the draft if there is one."""
    nodes: tuple[Node, ...]

    @property
    def target(self) -> Role:
        return self.roles[0]

    def with_target(self, target: Role) -> "Fleet":
        return replace(self, roles=(target, *self.roles[1:]))

    def with_roles(self, change: Callable[[Role], Role]) -> "Fleet":
        return replace(self, roles=tuple(map(change, self.roles)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCache:
    """The cache of a group that has found its place."""

    role: Role
    shares: CacheShares
    """What each rank's cache consists of: the least that any rank has memory for."""

    @property
    def num_blocks(self) -> int:
        return self.shares.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache on each rank."""
        return self.role.bytes_of(self.shares)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.role.block_size

    @property
    def rank_bytes(self) -> int:
        """The process, its weights and its cache."""
        return self.role.fixed_bytes + self.num_bytes

    @property
    def is_enough(self) -> bool:
        return self.num_bytes >= self.role.least_cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A fleet that was placed."""

    placement: Placement
    caches: Mapping[str, GroupCache]
    """The cache of each group, by the group's name."""
    overfull: Mapping[Node, int]
    """Nodes whose workers would take more than their main memory, and how many bytes."""

    @property
    def fits(self) -> bool:
        is_enough = all(cache.is_enough for cache in self.caches.values())
        return is_enough and not self.placement.unplaced and not self.overfull


def lay_out(fleet: Fleet) -> Layout:
    """Place everything, the target first, and share out the memory."""
    role_of = {group.name: role for role in fleet.roles for group in role.groups()}
    groups = [group for role in fleet.roles for group in role.groups()]
    placement = place(groups, fleet.nodes)
    taken = _taken_of_main_memory(placement, role_of)
    caches = {
        name: GroupCache(role=role_of[name], shares=_shares(role_of[name], nodes, taken))
        for name, nodes in placement.nodes.items()
    }
    return Layout(placement=placement, caches=caches, overfull=_overfull(placement, caches))


def _taken_of_main_memory(placement: Placement, role_of: Mapping[str, Role]) -> Counter[Node]:
    """Bytes by node: what is taken before caches are, whose sizes follow from what is left."""
    taken: Counter[Node] = Counter()
    for name, nodes in placement.nodes.items():
        for node in nodes:
            if not role_of[name].on_gpu:
                taken[node] += role_of[name].fixed_bytes
    return taken


def _shares(role: Role, nodes: Sequence[Node], taken: Counter[Node]) -> CacheShares:
    free_bytes = min(
        memory_bytes(role, node) - (role.fixed_bytes if role.on_gpu else taken[node])
        for node in nodes
    )
    return role.shares(free_bytes)


def _overfull(placement: Placement, caches: Mapping[str, GroupCache]) -> dict[Node, int]:
    used: Counter[Node] = Counter()
    for name, nodes in placement.nodes.items():
        for node in nodes:
            if not caches[name].role.on_gpu:
                used[node] += caches[name].rank_bytes
    return {node: num_bytes for node, num_bytes in used.items() if num_bytes > node.memory_bytes}
