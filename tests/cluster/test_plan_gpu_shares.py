"""`tandem plan` where a draft replica and a rank of the target share a GPU."""

import re

import pytest

from cluster.plan.tables import format_plan
from tests.cluster.plans import EIGHT_H100, ONE_H100, make_plan_of, problem
from workers.cache_size import GIB, PROCESS_BYTES


def test_one_gpu_holds_a_draft_beside_the_target(llamas: dict[str, object]) -> None:
    small = {"target": llamas["draft"], "draft": llamas["draft"]}
    assert problem(small, ONE_H100) == (
        "the node has 1 GPU and the plan needs 2: 1 target group and 1 draft replica; "
        "draft_gpu_share=0.1 would fit (a draft replica beside a rank of the target), and so would "
        "1 more node of h100"
    )
    plan = make_plan_of({**small, "draft_gpu_share": 0.1}, ONE_H100)
    assert plan.problems == ()
    assert "| h100 | target 0, draft 0 | 1 of 1 |" in format_plan(plan)
    target, draft = plan.fleet.roles
    for role, part in ((target, 0.9), (draft, 0.1)):
        free = int(80 * GIB * part) - role.size.weight_bytes - PROCESS_BYTES
        cache = plan.layout.caches[f"{role.name} 0"]
        assert cache.shares == role.shares(free)
        assert cache.rank_bytes < 80 * GIB * part


@pytest.mark.parametrize(("gpu_memory_gib", "share"), [(24, 0.1), (12, 0.2), (5, 0.4)])
def test_the_share_that_is_advised_holds_the_draft(
    gpu_memory_gib: int, share: float, llamas: dict[str, object]
) -> None:
    small = {"target": llamas["draft"], "draft": llamas["draft"]}
    node = {**ONE_H100, "gpu_memory_gib": gpu_memory_gib}
    assert f"; draft_gpu_share={share} would fit" in problem(small, node)
    assert make_plan_of({**small, "draft_gpu_share": share}, node).problems == ()


def test_a_part_of_a_gpu_that_is_too_small_is_said(llamas: dict[str, object]) -> None:
    small = {"target": llamas["draft"], "draft": llamas["draft"]}
    args = {**small, "draft_gpu_share": 0.01}
    assert problem(args, ONE_H100).startswith(
        "one rank of the draft needs 1.4 GiB of weights and 0.01 of a GPU of h100 has 819.2 MiB; "
        "draft_gpu_share=0.1 would fit"
    )


def test_parts_of_gpus_that_are_too_few_are_said(llamas: dict[str, object]) -> None:
    small = {"target": llamas["draft"], "draft": llamas["draft"]}
    args: dict[str, object] = {**small, "draft_gpu_share": 0.4}
    assert problem({**args, "num_draft_replicas": 2}, ONE_H100) == (
        "the node has 1 GPU and the plan needs 1.4: 1 target group (0.6 of a GPU each) and 2 draft "
        "replicas (0.4 of a GPU each); 1 more node of h100 would fit, and so would "
        "num_draft_replicas=1"
    )
    args |= {"num_target_groups": 2, "tensor_parallel_size": 2}
    sentence = problem(args, {**EIGHT_H100, "num_gpus": 3})
    assert "2 target groups of 2 ranks (0.6 of a GPU each) and 1 draft replica (0.4" in sentence
    assert re.search(r"target 1 finds no 2 times 0.6 of a GPU with [\d.]+ GiB of memory", sentence)


def test_no_other_number_of_ranks_is_advised_than_may_be(llamas: dict[str, object]) -> None:
    args = {**llamas, "draft_gpu_share": 0.5}
    assert "tensor_parallel_size" not in problem(args, EIGHT_H100)
    quantized = {"target": llamas["target"], "drafter": "none", "quantization": "int8"}
    small = {**EIGHT_H100, "gpu_memory_gib": 40}
    assert "tensor_parallel_size" not in problem(quantized, small)
