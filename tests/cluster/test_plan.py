"""`tandem plan`: what fits, and the sentences about what does not."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.placement import LEAST_CPUS, RankResources
from cluster.plan.tables import format_plan
from tandem.__main__ import main
from tests.cluster.plans import EIGHT_H100, LAPTOP, make_plan_of, problem, write
from tests.tiny_models import save_model
from workers.cache_size import GIB, PROCESS_BYTES, CacheShares
from workers.errors import ConfigError
from workers.model import Model, load_model
from workers.paged_model import CacheOptions, PagedModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """One with recurrent layers too."""
    folder = tmp_path_factory.mktemp("models")
    return {
        family: load_model(save_model(folder / family, family), dtype="float32", device="cpu")
        for family in ("llama", "qwen3_5")
    }


@pytest.mark.parametrize("options", [{}, {"max_model_len": 100}, {"kv_cache_gib": 0.0001}])
@pytest.mark.parametrize("free_bytes", [30_000, 90_000, GIB])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.usefixtures("_sizes_once")
def test_the_cache_has_as_many_blocks_as_a_worker_makes(
    family: str,
    options: dict[str, float],
    free_bytes: int,
    models: dict[str, Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models[family]
    memory = SimpleNamespace(available=free_bytes)
    monkeypatch.setattr("workers.paged_model.psutil.virtual_memory", lambda: memory)
    plan = make_plan_of(
        {"target": model.name, "drafter": "none", "dtype": "float32", **options}, LAPTOP
    )
    role = plan.fleet.target
    cache_options = CacheOptions(**{**options, "block_size": 16})  # type: ignore[arg-type]
    try:
        paged = PagedModel(model, cache_options)
    except ConfigError:  # of one sequence
        assert role.cache_bytes(free_bytes) < role.least_cache_bytes
    else:
        shares = CacheShares(num_blocks=paged.num_blocks, num_states=paged.num_states)
        assert role.shares(free_bytes) == shares


def test_the_bundled_pair_fits_a_laptop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert main(["plan", str(write(tmp_path, {"nodes": [LAPTOP]}))]) == 0
    assert "| 1 x target | tandem-demo in bfloat16 " in caplog.text
    assert "| laptop | target 0, draft 0 |" in caplog.text
    assert "All of it fits." in caplog.text


@pytest.mark.parametrize(
    ("drafter", "roles"),
    [
        ("prompt_lookup", ["target"]),
        ("none", ["target"]),
        ("prompt_lookup,model", ["target", "draft"]),
    ],
)
def test_drafts_are_planned_for_a_draft_model_only(drafter: str, roles: list[str]) -> None:
    plan = make_plan_of({"drafter": drafter}, LAPTOP)
    assert [role.name for role in plan.fleet.roles] == roles


def test_figures_of_a_large_model(llamas: dict[str, object]) -> None:
    plan = make_plan_of({**llamas, "tensor_parallel_size": 4, "num_draft_replicas": 4}, EIGHT_H100)
    assert plan.problems == ()
    target, draft = plan.fleet.roles
    hidden, kv, wide, vocab, layers = 24576, 8192, 86016, 128256, 8
    shared = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide)
    norms = (2 * layers + 1) * hidden
    assert target.size.weight_bytes == 2 * (norms + (shared + 2 * vocab * hidden) // 4)
    assert target.size.slot_bytes == 2 * 2 * layers * kv // 4
    assert draft.size.tp_size == 1
    free = 80 * GIB - target.size.weight_bytes - PROCESS_BYTES
    cache = plan.layout.caches["target 0"]
    assert cache.num_blocks == int(free * 0.9) // (16 * target.size.slot_bytes)
    assert plan.bundles.bundles == ({"CPU": LEAST_CPUS, "GPU": 1},) * 4
    assert plan.bundles.strategy == "STRICT_PACK"
    shown = format_plan(plan)
    assert "| 1 x target of 4 ranks |" in shown
    assert "target 0 (ranks 0-3), draft 0, draft 1, draft 2, draft 3 | 8 of 8" in shown


def test_weights_that_are_too_large_need_more_ranks(llamas: dict[str, object]) -> None:
    assert problem({**llamas, "max_model_len": 8192}, EIGHT_H100) == (
        "one rank of the target needs 130.2 GiB of weights and a GPU of h100 has 80.0 GiB; "
        "tensor_parallel_size=2 would fit (65.1 GiB of weights, room for 106,000 tokens), and so "
        "would GPUs of at least 133 GiB"
    )


@pytest.mark.parametrize(
    "args",
    [
        {"max_model_len": 8192},
        {"max_model_len": 131072, "tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "kv_cache_gib": 20},
        {"tensor_parallel_size": 4, "num_target_groups": 2, "num_draft_replicas": 4},
        {"tensor_parallel_size": 4, "num_draft_replicas": 5},
        {"tensor_parallel_size": 4, "device": "cpu"},
        {"tensor_parallel_size": 4, "draft_gpu_share": 0.01},
        {
            "num_target_groups": 2,
            "tensor_parallel_size": 4,
            "num_draft_replicas": 9,
            "draft_gpu_share": 0.1,
        },
    ],
)
def test_what_is_said_to_fit_does(args: dict[str, object], llamas: dict[str, object]) -> None:
    args = {**llamas, **args}
    remedies = problem(args, EIGHT_H100).split("; ")[1]
    assert "would fit" in remedies
    for option, value in re.findall(r"(\w+)=([\d.]+)", remedies):
        assert make_plan_of({**args, option: value}, EIGHT_H100).problems == (), option
    for number in re.findall(r"(\d+) more nodes? of h100", remedies):
        more = {**EIGHT_H100, "count": 1 + int(number)}
        assert make_plan_of(args, more).problems == ()
        assert make_plan_of(args, {**more, "count": int(number)}).problems != ()
    for gib in re.findall(r"GPUs of at least (\d+) GiB", remedies):
        assert make_plan_of(args, {**EIGHT_H100, "gpu_memory_gib": int(gib)}).problems == ()
        assert make_plan_of(args, {**EIGHT_H100, "gpu_memory_gib": int(gib) - 1}).problems != ()


def test_more_ranks_may_need_more_nodes(llamas: dict[str, object]) -> None:
    advice = problem(llamas, {**EIGHT_H100, "num_gpus": 1, "count": 2})
    assert "; tensor_parallel_size=2 with 1 more node of h100 would fit, and so" in advice


def test_a_cache_that_is_too_small_for_a_sequence(llamas: dict[str, object]) -> None:
    args = {**llamas, "tensor_parallel_size": 2, "max_model_len": 131072}
    assert problem(args, EIGHT_H100) == (
        "one rank of the target needs 65.1 GiB of weights, which leaves 12.9 GiB of a GPU of h100 "
        "(80.0 GiB) for its KV cache, and one sequence of max_model_len=131072 takes 16.0 GiB; "
        "tensor_parallel_size=4 would fit (32.6 GiB of weights, room for 692,128 tokens), and so "
        "would max_model_len=106000 or GPUs of at least 84 GiB"
    )


def test_a_cache_that_is_asked_too_large(llamas: dict[str, object]) -> None:
    args = {**llamas, "tensor_parallel_size": 2, "kv_cache_gib": 20}
    sentence = problem(args, EIGHT_H100)
    assert "65.1 GiB of weights and 20.0 GiB for its KV cache (kv_cache_gib=20)" in sentence
    assert "leaving out kv_cache_gib" in sentence


def test_a_cache_that_is_asked_too_small(llamas: dict[str, object]) -> None:
    args = {**llamas, "tensor_parallel_size": 4, "kv_cache_gib": 1, "max_model_len": 131072}
    sentence = problem(args, EIGHT_H100)
    assert sentence.startswith(
        "a rank of the target is given kv_cache_gib=1, and one sequence of max_model_len=131072 "
        "takes 8.0 GiB"
    )
    assert "; max_model_len=16384 would fit, and so would leaving out kv_cache_gib" in sentence


def test_too_few_gpus(llamas: dict[str, object]) -> None:
    args = {**llamas, "tensor_parallel_size": 4, "num_target_groups": 2, "num_draft_replicas": 4}
    assert problem(args, EIGHT_H100) == (
        "the node has 8 GPUs and the plan needs 12: 2 target groups of 4 ranks and 4 draft "
        "replicas; draft_gpu_share=0.1 would fit (a draft replica beside a rank of the target), "
        "and so would 1 more node of h100 or num_target_groups=1"
    )


def test_gpus_that_are_too_far_apart(llamas: dict[str, object]) -> None:
    args = {**llamas, "drafter": "none", "draft": None, "tensor_parallel_size": 4}
    nodes = {**EIGHT_H100, "num_gpus": 6, "count": 2}
    sentence = problem({**args, "num_target_groups": 3}, nodes)
    assert re.search(r"target 2 finds no 4 GPUs with [\d.]+ GiB of memory on one node;", sentence)
    assert "; 1 more node of h100 would fit, and so would num_target_groups=2" in sentence


def test_main_memory_that_workers_share(tmp_path: Path) -> None:
    name = save_model(tmp_path, dtype="float32", max_position_embeddings=262144)
    args = {"target": name, "draft": name, "num_draft_replicas": 3, "max_num_seqs": 1024}
    sentence = problem(args, LAPTOP)
    assert "the workers on laptop would take " in sentence
    assert "and it has 8.0 GiB of memory; " in sentence
    assert make_plan_of({**args, "num_draft_replicas": 2}, LAPTOP).problems == ()


def test_main_memory_that_is_too_small(llamas: dict[str, object]) -> None:
    sentence = problem({**llamas, "drafter": "none", "draft": None}, LAPTOP)
    assert sentence.startswith(
        "one rank of the target needs 130.2 GiB of weights and a node of laptop has 8.0 GiB; "
        "nodes of at least "
    )


def test_a_process_takes_memory_beside_its_weights() -> None:
    sentence = problem({"drafter": "none"}, {**LAPTOP, "memory_gib": 0.2})
    assert re.match(
        r"one rank of the target needs [\d.]+ MiB of weights, 512.0 MiB for its process, and a "
        r"node of laptop has 204.8 MiB; ",
        sentence,
    )


def test_no_node_has_memory_left() -> None:
    args = {"num_draft_replicas": 3, "kv_cache_gib": 0.1}
    sentence = problem(args, {**LAPTOP, "memory_gib": 1.5})
    assert re.search(r"draft \d finds no node with [\d.]+ MiB of memory left;", sentence)
    assert (
        make_plan_of({**args, "num_draft_replicas": 1}, {**LAPTOP, "memory_gib": 1.5}).problems
        == ()
    )


def test_a_draft_can_be_too_large_as_well(llamas: dict[str, object]) -> None:
    args = {"target": llamas["draft"], "draft": llamas["target"]}
    assert problem(args, EIGHT_H100).startswith("one rank of the draft needs 130.2 GiB of weights")


def test_status_1_says_that_something_does_not_fit(
    llamas: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert main(["plan", str(write(tmp_path, {"args": llamas, "nodes": [EIGHT_H100]}))]) == 1
    assert "Does not fit: one rank of the target needs" in caplog.text
    assert "All of it fits" not in caplog.text


# What is worth knowing


def test_a_cache_for_fewer_sequences_than_run_is_said(llamas: dict[str, object]) -> None:
    args = {**llamas, "drafter": "none", "draft": None, "tensor_parallel_size": 4}
    plan = make_plan_of({**args, "max_model_len": 32768}, EIGHT_H100)
    assert plan.problems == ()
    (note,) = plan.notes
    assert note.startswith(
        "the KV cache of a target group holds 21 sequences of max_model_len=32768 (692,128 "
        "tokens), less than max_num_seqs=64"
    )
    assert note.endswith("64 sequences fit up to 10,800 tokens each")
    assert make_plan_of({**args, "max_model_len": 10800}, EIGHT_H100).notes == ()


def test_a_context_that_the_cache_cuts_short_is_said(llamas: dict[str, object]) -> None:
    args = {**llamas, "drafter": "none", "draft": None, "tensor_parallel_size": 2}
    (note,) = make_plan_of(args, EIGHT_H100).notes
    assert "holds 106,000 tokens, less than the 131,072 that the model allows" in note


def test_a_group_over_several_nodes_is_said(llamas: dict[str, object]) -> None:
    args = {**llamas, "drafter": "none", "draft": None, "tensor_parallel_size": 8}
    plan = make_plan_of(args, {**EIGHT_H100, "num_gpus": 4, "count": 2})
    assert plan.bundles.strategy == "PACK"
    assert any(note.startswith("target 0 is spread over 2 nodes") for note in plan.notes)
    assert "| h100-1 | target 0 (ranks 4-7) | 4 of 4 |" in format_plan(plan)


def test_gpus_that_ray_cannot_tell_apart_are_said(llamas: dict[str, object]) -> None:
    small = {**EIGHT_H100, "name": "l4", "gpu_memory_gib": 22}
    args = {**llamas, "tensor_parallel_size": 4}
    notes = make_plan_of(args, EIGHT_H100, small).notes
    assert any(
        note.startswith("the target fits the GPUs of h100, not those of l4") for note in notes
    )


def test_an_order_that_serve_does_not_promise_is_said(llamas: dict[str, object]) -> None:
    args = {**llamas, "tensor_parallel_size": 4, "num_draft_replicas": 4}
    nodes = {**EIGHT_H100, "num_gpus": 4, "count": 2}
    plan = make_plan_of(args, nodes)
    assert plan.problems == ()
    assert any("before the draft replicas" in note for note in plan.notes)
    notes = make_plan_of({**args, "num_draft_replicas": 1}, nodes).notes
    assert not any("before the draft replicas" in note for note in notes)


def test_workers_that_share_cores_are_said() -> None:
    nodes = {**LAPTOP, "num_cpus": 2}
    (note,) = make_plan_of({"num_draft_replicas": 2}, nodes).notes
    assert note == "3 workers share the 2 cores of laptop, and slow each other down"
    assert make_plan_of({}, nodes).notes == ()


def test_on_cpus_the_main_memory_counts(llamas: dict[str, object]) -> None:
    args = {**llamas, "tensor_parallel_size": 4, "device": "cpu", "max_num_seqs": 4}
    plan = make_plan_of(args, EIGHT_H100)
    assert plan.problems == ()
    assert plan.fleet.target.resources == RankResources(num_cpus=LEAST_CPUS, num_gpus=0)
    assert "| h100 | target 0 (ranks 0-3), draft 0 | 0 of 8 |" in format_plan(plan)


@pytest.mark.parametrize("args", [{"target": "organization/name"}, {"draft": "organization/name"}])
def test_a_model_that_is_not_here_is_asked_for_once(args: dict[str, object]) -> None:
    """The hub's own client would try for half a minute; tests run with HF_HUB_OFFLINE."""
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to download it"):
        make_plan_of({"drafter": "model", "draft": "tandem-demo-draft", **args}, LAPTOP)
