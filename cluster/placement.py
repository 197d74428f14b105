"""What groups of ranks ask Ray for, and where they find room. Pure: neither Ray nor torch.

A target group asks Ray for one bundle per rank, all in one placement group. A draft replica is a
group of one rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cluster.gpu_shares import GPU_PARTS, gpu_parts
from cluster.topology import Node, uses_gpus
from workers.errors import ConfigError, UnsupportedModelError
from workers.tensor_plans import has_whole_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Strategy = Literal["STRICT_PACK", "PACK"]

# Numbers of a config.json that count what tensor parallelism gives to the ranks.
HEAD_COUNTS = ("attention_heads", "key_value_heads")
WIDTHS = ("intermediate_size", "n_inner")
# Ways to cut projections by which each rank attends with its own heads.
OWN_HEADS = frozenset({"colwise", "conv1d_by_heads"})
EXPERTS = ("num_local_experts",)
# No group is larger; suggestions end here.
MAX_TP_SIZE = 64
# Ray places no bundle that asks for nothing.
LEAST_CPUS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """Cores and GPUs that Ray has to find for one rank."""

    num_cpus: float
    num_gpus: float

    def __post_init__(self) -> None:
        if self.num_cpus <= 0 and self.num_gpus <= 0:
            raise ValueError("Ray places no bundle that asks for nothing")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources as Ray names them."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    @property
    def gpu_parts(self) -> int:
        return gpu_parts(self.num_gpus)

    def gpu_memory_bytes(self, node: Node) -> int:
        """What a rank may take of a GPU's memory."""
        return int(node.gpu_memory_bytes * self.num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBundles:
    """A group's placement group."""

    bundles: tuple[dict[str, float], ...]
    """The resources of each rank; Serve runs the replica itself, rank 0, in the first bundle."""
    strategy: Strategy

    def serve_options(self) -> dict[str, Any]:
        """The deployment options that ask Serve for it."""
        return {
            "placement_group_bundles": [dict(bundle) for bundle in self.bundles],
            "placement_group_strategy": self.strategy,
        }


def rank_resources(device: str, nodes: Sequence[Node], gpu_share: float) -> RankResources:
    """So much of a GPU for each rank where the option `device` means GPUs on these nodes.

    Ray's count of cores is no limit: the number of threads is an option of its own, and a laptop
    must hold all replicas.
    """
    return RankResources(num_cpus=LEAST_CPUS, num_gpus=gpu_share if uses_gpus(device, nodes) else 0)


def group_bundles(*, tp_size: int, resources: RankResources, nodes: Sequence[Node]) -> GroupBundles:
    """The bundles of a group of `tp_size` ranks.

    The ranks exchange every layer's output, so they stay on one node (`STRICT_PACK`) while some
    node is large enough for all of them; else on as few as Ray finds (`PACK`).
    """
    fits_one_node = any(_Room.of(node).num_ranks(resources) >= tp_size for node in nodes)
    return GroupBundles(
        bundles=tuple(resources.bundle for _ in range(tp_size)),
        strategy="STRICT_PACK" if fits_one_node else "PACK",
    )


def bundle_order(bundle_nodes: Sequence[str]) -> tuple[int, ...]:
    """The bundle of each rank, so that the ranks of a node are neighbours.

    Ray numbers the bundles of a PACK group without regard to nodes. Rank 0 stays in bundle 0.

    Args:
        bundle_nodes: the node that each bundle has landed on.
    """
    nodes = list(dict.fromkeys(bundle_nodes))
    return tuple(sorted(range(len(bundle_nodes)), key=lambda b: nodes.index(bundle_nodes[b])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks to be placed together."""

    name: str
    num_ranks: int
    resources: RankResources
    rank_bytes: int = 0
    """The least memory a rank can do with: of its part of a GPU, or of its node if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where groups have found room."""

    nodes: Mapping[str, tuple[Node, ...]]
    """The node of each rank, by the group's name."""
    unplaced: tuple[Group, ...]


def place(groups: Sequence[Group], nodes: Sequence[Node]) -> Placement:
    """Give each group in turn the nodes with most GPUs or, without GPUs, cores to spare."""
    rooms = [_Room.of(node) for node in nodes]
    placed: dict[str, tuple[Node, ...]] = {}
    unplaced = []
    for group in groups:
        bundles = group_bundles(tp_size=group.num_ranks, resources=group.resources, nodes=nodes)
        homes = _find_homes(group, bundles.strategy, rooms)
        if homes:
            placed[group.name] = tuple(room.node for room in homes)
        else:
            unplaced.append(group)
        for room in homes:
            room.take(group)
    return Placement(nodes=placed, unplaced=tuple(unplaced))


@dataclass(slots=True, kw_only=True)
class _Room:
    """The room that is left on a node."""

    node: Node
    num_cpus: float
    cards: list[int]
    """The parts that are left of each GPU: Ray gives a rank those of one, never of two."""
    memory_bytes: int
    num_taken: int = 0
    """Ranks that were placed here."""

    @classmethod
    def of(cls, node: Node) -> "_Room":
        return cls(
            node=node,
            num_cpus=node.num_cpus,
            cards=[GPU_PARTS] * int(node.num_gpus),
            memory_bytes=node.memory_bytes,
        )

    def num_ranks(self, resources: RankResources, rank_bytes: int = 0) -> int:
        """The number of ranks that there is room for."""
        limits: list[float] = []
        if resources.num_cpus:
            limits.append(self.num_cpus // resources.num_cpus)
        if resources.num_gpus:
            limits.append(sum(left // resources.gpu_parts for left in self.cards))
            if rank_bytes > resources.gpu_memory_bytes(self.node):
                return 0
        elif rank_bytes:
            limits.append(self.memory_bytes // rank_bytes)
        return int(min(limits))

    def to_spare(self, resources: RankResources) -> float:
        """GPUs, or the cores that no rank has to itself."""
        return sum(self.cards) if resources.num_gpus else self.node.num_cpus - self.num_taken

    def take(self, group: Group) -> None:
        """One rank of the group: on the fullest GPU that has room for it, as Ray does it."""
        self.num_taken += 1
        self.num_cpus -= group.resources.num_cpus
        if parts := group.resources.gpu_parts:
            fullest = min(left for left in self.cards if left >= parts)
            self.cards[self.cards.index(fullest)] -= parts
        else:
            self.memory_bytes -= group.rank_bytes


def _find_homes(group: Group, strategy: Strategy, rooms: Sequence[_Room]) -> list[_Room]:
    """The room of each rank; none if there is not enough."""
    homes: list[_Room] = []
    for room in sorted(rooms, key=lambda room: room.to_spare(group.resources), reverse=True):
        num_ranks = room.num_ranks(group.resources, group.rank_bytes)
        if strategy == "STRICT_PACK" and num_ranks < group.num_ranks:
            continue
        homes += [room] * min(num_ranks, group.num_ranks - len(homes))
    return homes if len(homes) == group.num_ranks else []


def check_tensor_parallel(name: str, config: "PreTrainedConfig", tp_size: int) -> None:
    """Make sure that `tp_size` ranks can have equal shares of a model; needs no weights.

    Raises: UnsupportedModelError if there is no plan to share the model, ConfigError naming
    the number that `tp_size` does not divide, and the sizes that would do.
    """
    if tp_size == 1:
        return
    counts = _shared_counts(config)
    if not counts:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {tp_size}, but there is no tensor-parallel plan for "
            f"the layers of {name!r} ({config.get_text_config().model_type}); use 1"
        )
    for count_name, count in counts.items():
        if count % tp_size:
            sizes = ", ".join(map(str, tensor_parallel_sizes(config)))
            raise ConfigError(
                f"tensor_parallel_size is {tp_size}, but {name!r} has {count_name}={count}, which "
                f"{tp_size} ranks cannot share evenly; it may be {sizes}"
            )


def tensor_parallel_sizes(config: "PreTrainedConfig") -> list[int]:
    """The numbers of ranks that can have equal shares of a model, up to MAX_TP_SIZE."""
    divisor = math.gcd(*_shared_counts(config).values()) or 1
    return [size for size in range(1, MAX_TP_SIZE + 1) if divisor % size == 0]


def _shared_counts(config: "PreTrainedConfig") -> dict[str, int]:
    """The numbers that the ranks divide, by their names; none where no plan shares the layers."""
    text_config = config.get_text_config()
    plan: Mapping[str, str] = text_config.base_model_tp_plan or {}
    if not plan:
        return {}
    # where the projections' output is gathered, each rank attends with all heads
    has_own_heads = any("att" in rule and style in OWN_HEADS for rule, style in plan.items())
    widths = EXPERTS if has_whole_experts(config) else WIDTHS
    suffixes = HEAD_COUNTS + widths if has_own_heads else widths
    # some have other names in the file than in the library
    names = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    names += [name for name in text_config.to_dict() if name not in names]
    counts = {n: getattr(text_config, n, None) for n in names if n.endswith(suffixes)}
    return {n: count for n, count in counts.items() if isinstance(count, int) and count > 0}
