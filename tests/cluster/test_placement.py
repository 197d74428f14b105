"""What groups ask Ray for, where they find room, and which models ranks can share."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

import workers
from cluster.gpu_shares import target_gpu_share
from cluster.placement import (
    LEAST_CPUS,
    Group,
    RankResources,
    bundle_order,
    check_tensor_parallel,
    group_bundles,
    place,
    rank_resources,
    tensor_parallel_sizes,
)
from cluster.topology import Node
from tests.tiny_models import make_config
from workers.cache_size import GIB
from workers.errors import ConfigError, UnsupportedModelError
from workers.tensor_plans import add_plan

ONE_GPU = RankResources(num_cpus=1, num_gpus=1)
ONE_CORE = RankResources(num_cpus=1, num_gpus=0)


def gpu_nodes(*numbers: int, gpu_memory_gib: int = 80) -> list[Node]:
    return [
        Node(
            name=f"node-{index}",
            num_cpus=64,
            num_gpus=number,
            memory_bytes=500 * GIB,
            gpu_memory_bytes=gpu_memory_gib * GIB,
        )
        for index, number in enumerate(numbers)
    ]


def cpu_nodes(*memories_gib: int, num_cpus: int = 2) -> list[Node]:
    return [
        Node(name=f"node-{index}", num_cpus=num_cpus, memory_bytes=memory * GIB)
        for index, memory in enumerate(memories_gib)
    ]


def homes(groups: Sequence[Group], nodes: Sequence[Node]) -> dict[str, list[str]]:
    placed = place(groups, nodes).nodes
    return {name: [node.name for node in on] for name, on in placed.items()}


def test_importing_it_imports_neither_torch_nor_ray() -> None:
    """The driver uses it, before there are workers."""
    code = "import sys, cluster.placement; sys.exit(bool({'torch', 'ray'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("tp_size", "nodes", "strategy"),
    [
        (4, gpu_nodes(4, 4), "STRICT_PACK"),
        (4, gpu_nodes(2, 8), "STRICT_PACK"),
        (4, gpu_nodes(2, 2), "PACK"),
        (1, gpu_nodes(1), "STRICT_PACK"),
        (2, [], "PACK"),
    ],
)
def test_a_group_stays_on_one_node_while_one_is_large_enough(
    tp_size: int, nodes: list[Node], strategy: str
) -> None:
    bundles = group_bundles(tp_size=tp_size, resources=ONE_GPU, nodes=nodes)
    assert bundles.serve_options() == {
        "placement_group_bundles": [{"CPU": 1, "GPU": 1}] * tp_size,
        "placement_group_strategy": strategy,
    }


def test_cores_decide_too() -> None:
    nodes = [Node(name="a", num_cpus=3, num_gpus=8)]
    assert group_bundles(tp_size=4, resources=ONE_GPU, nodes=nodes).strategy == "PACK"


def test_without_gpus_bundles_are_of_cores() -> None:
    resources = rank_resources("auto", cpu_nodes(8), 1)
    bundles = group_bundles(tp_size=2, resources=resources, nodes=cpu_nodes(8))
    assert bundles.bundles == ({"CPU": LEAST_CPUS}, {"CPU": LEAST_CPUS})
    assert bundles.strategy == "STRICT_PACK"


def test_a_rank_asks_for_a_gpu_where_the_device_means_one() -> None:
    assert rank_resources("auto", gpu_nodes(1), 1).num_gpus == 1
    assert rank_resources("auto", gpu_nodes(1), 0.1).bundle == {"CPU": LEAST_CPUS, "GPU": 0.1}
    assert rank_resources("cpu", gpu_nodes(1), 1).num_gpus == 0


def test_a_bundle_that_asks_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        RankResources(num_cpus=0, num_gpus=0)


@pytest.mark.parametrize(
    ("bundle_nodes", "expected"),
    [
        (["a", "a", "a"], (0, 1, 2)),
        (["a", "b", "a", "b"], (0, 2, 1, 3)),
        (["b", "a", "a", "b"], (0, 3, 1, 2)),
        (["c", "b", "a", "b", "c"], (0, 4, 1, 3, 2)),
    ],
)
def test_ranks_of_a_node_are_neighbours_and_rank_0_is_in_bundle_0(
    bundle_nodes: list[str], expected: tuple[int, ...]
) -> None:
    assert bundle_order(bundle_nodes) == expected


def targets(number: int, *, num_ranks: int, rank_gib: int = 10) -> list[Group]:
    return [
        Group(
            name=f"target {index}",
            num_ranks=num_ranks,
            resources=ONE_GPU,
            rank_bytes=rank_gib * GIB,
        )
        for index in range(number)
    ]


def test_groups_spread_over_nodes_and_stay_whole() -> None:
    assert homes(targets(3, num_ranks=2), gpu_nodes(4, 4)) == {
        "target 0": ["node-0"] * 2,
        "target 1": ["node-1"] * 2,
        "target 2": ["node-0"] * 2,
    }


def test_a_group_that_no_node_can_hold_takes_the_largest_first() -> None:
    assert homes(targets(1, num_ranks=6), gpu_nodes(2, 4)) == {
        "target 0": ["node-1"] * 4 + ["node-0"] * 2
    }


def test_a_group_is_not_split_where_a_whole_one_could_have_been() -> None:
    placement = place(targets(3, num_ranks=3), gpu_nodes(4, 4))
    assert [group.name for group in placement.unplaced] == ["target 2"]


def test_gpus_that_are_too_small_are_passed_over() -> None:
    small, large = gpu_nodes(8, gpu_memory_gib=24), gpu_nodes(0, 1, gpu_memory_gib=80)
    assert homes(targets(1, num_ranks=1, rank_gib=60), small + large) == {"target 0": ["node-1"]}
    assert place(targets(1, num_ranks=1, rank_gib=60), small).unplaced


def sharing(
    draft_share: float, *, num_groups: int = 1, num_ranks: int = 1, num_drafts: int = 1
) -> list[Group]:
    """Target groups whose ranks leave a part of their GPUs to the drafts, which come last."""
    parts = [
        ("target", num_groups, num_ranks, target_gpu_share(draft_share)),
        ("draft", num_drafts, 1, draft_share),
    ]
    return [
        Group(
            name=f"{role} {index}",
            num_ranks=ranks,
            resources=rank_resources("cuda", [], part),
        )
        for role, number, ranks, part in parts
        for index in range(number)
    ]


@pytest.mark.parametrize(
    ("groups", "num_gpus", "unplaced"),
    [
        (sharing(0.1), 1, []),
        (sharing(0.1, num_drafts=2), 1, ["draft 1"]),
        (sharing(0.1, num_groups=2), 1, ["target 1"]),
        (sharing(0.0001, num_drafts=2), 1, ["draft 1"]),
        (sharing(1), 1, ["draft 0"]),
        (sharing(1), 2, []),
        (sharing(0.5), 1, []),
        (sharing(0.5, num_groups=2, num_drafts=2), 2, []),
        (sharing(0.1, num_ranks=2, num_drafts=3), 2, ["draft 2"]),
        # a part is of one GPU: a tenth of each of three is no third of one
        (sharing(0.3, num_groups=3, num_drafts=4), 3, ["draft 3"]),
        (sharing(0.1, num_groups=0, num_drafts=11), 1, ["draft 10"]),
        (sharing(0.3, num_groups=0, num_drafts=7), 2, ["draft 6"]),
    ],
)
def test_parts_of_a_gpu_are_those_of_one(
    groups: list[Group], num_gpus: int, unplaced: list[str]
) -> None:
    placement = place(groups, gpu_nodes(num_gpus))
    assert [group.name for group in placement.unplaced] == unplaced


def test_a_part_is_of_the_fullest_gpu_as_ray_does_it() -> None:
    drafts = sharing(0.1, num_groups=0, num_drafts=5)
    assert not place([*drafts, *targets(1, num_ranks=1)], gpu_nodes(2)).unplaced


def test_a_part_of_a_gpu_has_that_part_of_its_memory() -> None:
    (target, draft) = sharing(0.1)
    for group, most_gib in ((target, 72), (draft, 8)):
        fitting = replace(group, rank_bytes=most_gib * GIB)
        assert not place([fitting], gpu_nodes(1)).unplaced
        assert place([replace(fitting, rank_bytes=most_gib * GIB + 1)], gpu_nodes(1)).unplaced


def test_ranks_take_what_a_draft_leaves_of_a_gpu() -> None:
    shares = (1, 0.5, 0.3, 0.1, 0.0001)
    assert [target_gpu_share(share) for share in shares] == [1, 0.5, 0.7, 0.9, 0.9999]


def test_workers_without_gpus_share_memory_and_spread_over_cores() -> None:
    drafts = [
        Group(name=f"draft {n}", num_ranks=1, resources=ONE_CORE, rank_bytes=3 * GIB)
        for n in range(4)
    ]
    placement = place(drafts, cpu_nodes(4, 8))
    found = {name: nodes[0].name for name, nodes in placement.nodes.items()}
    assert found == {"draft 0": "node-0", "draft 1": "node-1", "draft 2": "node-1"}
    assert [group.name for group in placement.unplaced] == ["draft 3"]


@pytest.mark.parametrize(
    ("family", "changes", "allowed"),
    [
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, [1, 2, 4]),
        ("llama", {"intermediate_size": 65}, [1]),
        ("qwen3", {}, [1, 2]),
        ("mixtral", {"num_key_value_heads": 1}, [1]),
        # its query, key and value are gathered, so every rank attends with all heads
        ("olmo2", {"num_key_value_heads": 1, "intermediate_size": 96}, [1, 2, 3, 4]),
        ("gpt_neox", {}, [1, 2, 4]),
        ("gpt2", {}, [1, 2, 4]),
        ("gpt2", {"n_inner": 66}, [1, 2]),
        ("gpt_oss", {}, [1, 2]),
        ("opt", {}, [1]),
    ],
)
def test_sizes_that_a_model_allows(
    family: str, changes: dict[str, object], allowed: list[int]
) -> None:
    config = make_config(family, **changes)
    add_plan(config)
    assert tensor_parallel_sizes(config)[: len(allowed)] == allowed
    for tp_size in range(1, 5):
        if tp_size in allowed:
            check_tensor_parallel("m", config, tp_size)
        else:
            with pytest.raises(ConfigError):
                check_tensor_parallel("m", config, tp_size)


def test_gpt2_is_not_shared_where_transformers_lacks_what_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(workers, "conv1d_sharing", raising=False)
    monkeypatch.setitem(sys.modules, "workers.conv1d_sharing", None)
    config = make_config("gpt2")
    add_plan(config)
    assert tensor_parallel_sizes(config) == [1]
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan"):
        check_tensor_parallel("m", config, 2)


@pytest.mark.parametrize(
    ("changes", "tp_size", "count"),
    [
        ({}, 4, "num_key_value_heads=2"),
        ({}, 3, "num_attention_heads=4"),
        ({"intermediate_size": 65}, 2, "intermediate_size=65"),
    ],
)
def test_what_cannot_be_shared_is_named_with_its_value(
    changes: dict[str, object], tp_size: int, count: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {tp_size}.* {count},"):
        check_tensor_parallel("m", make_config("llama", **changes), tp_size)


def test_sizes_that_would_do_are_named() -> None:
    config = make_config("llama", num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"it may be 1, 2, 4$"):
        check_tensor_parallel("m", config, 8)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no tensor-parallel plan.*opt"):
        check_tensor_parallel("m", make_config("opt"), 2)
