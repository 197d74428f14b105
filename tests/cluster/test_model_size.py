"""The sizes that `tandem plan` reckons with, against models that are really loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import ExpertParallelLayer, apply_expert_parallelism
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    apply_tensor_parallelism,
)
from transformers.initialization import no_tie_weights

from cluster.plan import model_size
from cluster.plan.model_size import size_draft, size_model
from tests.tiny_configs import SERVED, SUPPORTED
from tests.tiny_models import make_config, save_model
from workers import attention
from workers.drafters import model as draft_model
from workers.drafters.model import load_draft_model
from workers.errors import ConfigError
from workers.model import load_model
from workers.observation import observe_layers
from workers.quantization import PACKAGES_OF, is_installed
from workers.tensor_plans import add_plan, has_whole_experts

WITHOUT_TP_PLAN = {"opt", "gpt_bigcode"}
SHARED = sorted({*SUPPORTED} - WITHOUT_TP_PLAN)
"""Families of which each rank's share is compared with what transformers gives it."""


def check_size(family: str, tmp_path: Path) -> None:
    """The size of a model that one rank has, against what is loaded."""
    model = load_model(save_model(tmp_path, family), dtype="bfloat16", device="cpu")
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()  # config.json is enough
    size = size_model(str(tmp_path), dtype="bfloat16")
    assert size.weight_bytes == model.num_weight_bytes
    assert size.slot_bytes == model.slot_bytes
    assert size.state_bytes == model.state_bytes
    assert size.max_position == model.max_position
    assert size.dtype == "bfloat16"


@pytest.mark.parametrize("family", [family for family in SERVED if family not in SHARED])
def test_a_rank_alone_holds_what_is_loaded(family: str, tmp_path: Path) -> None:
    check_size(family, tmp_path)


def test_so_it_does_of_those_that_are_shared(has_all_combinations: bool, tmp_path: Path) -> None:
    """All families of which each rank's share is compared too, or three of them."""
    for family in SHARED if has_all_combinations else ("gemma2", "gpt2", "mixtral"):
        check_size(family, tmp_path / family)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_experts_have_a_size_in_any_dtype(family: str, tmp_path: Path) -> None:
    """On the meta device, torch multiplies groups of rows in bfloat16 alone."""
    make_config(family).save_pretrained(tmp_path)
    in_half = size_model(str(tmp_path), dtype="bfloat16").weight_bytes
    assert size_model(str(tmp_path), dtype="float32").weight_bytes == 2 * in_half


QUANTIZED = (
    "llama", "gpt2", "gemma2", "mixtral", "phi3", "llama4", "phimoe", "jamba", "mistral3",
)  # fmt: skip
"""Heads, tied or not, experts, routers, layers whose weights lie the other way round, and language
models in wrappers."""


@pytest.mark.parametrize("family", QUANTIZED)
def test_a_quantized_rank_holds_what_is_loaded(
    family: str, has_all_combinations: bool, tmp_path: Path
) -> None:
    """Each family takes one way in its turn, or all of them."""
    every = [*PACKAGES_OF]
    ways = every if has_all_combinations else [every[(QUANTIZED.index(family) + 1) % len(every)]]
    name = save_model(tmp_path, family)
    plain = size_model(name, dtype="bfloat16")
    installed = [how for how in ways if is_installed(PACKAGES_OF[how])]
    for how in installed:
        if (family, how) == ("gpt2", "int8"):
            continue  # is refused
        model = load_model(name, dtype="bfloat16", device="cpu", quantization=how)
        size = size_model(name, dtype="bfloat16", quantization=how)
        assert size.weight_bytes == model.num_weight_bytes
        assert size.weight_bytes < plain.weight_bytes
        assert size.precision == f"bfloat16 ({how})"
    if installed != ways:
        pytest.skip(f"only {installed} of {ways} are installed")


@pytest.fixture(scope="module")
def fake_ranks() -> Iterator[int]:
    """A process group of two whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield 2
    dist.destroy_process_group()


def sharded_by_transformers(family: str, tp_size: int) -> PreTrainedModel:
    """As loading with a plan does it, without weights."""
    attention.register()
    config = make_config(family)
    add_plan(config)
    with torch.device("meta"), no_tie_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.ATTENTION_NAME
        )
    ep_size = tp_size if has_whole_experts(config) else 1
    distributed = DistributedConfig(tp_size=tp_size, tp_plan="auto", ep_size=ep_size)
    plan, expert_plan, _ = model._resolve_parallel_plans(distributed)
    mesh = init_device_mesh("cpu", (tp_size,), mesh_dim_names=("tp",))
    apply_tensor_parallelism(model, mesh, plan)
    return apply_expert_parallelism(model, mesh, mesh, expert_plan)


@pytest.mark.parametrize("family", SHARED)
def test_each_rank_holds_what_transformers_gives_it(
    family: str, fake_ranks: int, tmp_path: Path
) -> None:
    make_config(family).save_pretrained(tmp_path)
    size = size_model(str(tmp_path), dtype="bfloat16", tp_size=fake_ranks)
    model = sharded_by_transformers(family, fake_ranks)
    local = {
        name: whole.to_local() if isinstance(whole, DTensor) else whole
        for name, whole in model.named_parameters()
    }
    if model.config.tie_word_embeddings:  # once loaded, it is the embedding
        del local["lm_head.weight"]
    assert size.weight_bytes == sum(parameter.nbytes for parameter in local.values())
    specs = observe_layers(family, model).attention
    assert size.slot_bytes == sum(spec.slot_bytes(torch.bfloat16) for spec in specs)


def test_every_way_of_transformers_to_share_is_known() -> None:
    """And ours, once they are registered."""
    add_plan(make_config("gpt2"))
    kinds = (TensorParallelLayer, ExpertParallelLayer)
    registered = {name for name, style in ALL_PARALLEL_STYLES.items() if isinstance(style, kinds)}
    assert registered == model_size.KNOWN_STYLES


def test_a_way_to_share_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_config("llama").save_pretrained(tmp_path)
    plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp.up_proj": "by_magic"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    with pytest.raises(ConfigError, match="cannot be foreseen: by_magic"):
        size_model(str(tmp_path), tp_size=2)


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    vocab_bytes = 97 * 32 * 4
    sizes = []
    for tied in (False, True):
        make_config("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
        sizes.append(size_model(str(tmp_path), dtype="float32").weight_bytes)
    assert sizes[0] - sizes[1] == vocab_bytes


def test_a_dtype_that_nobody_names_is_said(tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    size = size_model(str(tmp_path))
    assert size.dtype == "float32"
    assert "names no dtype" in size.remarks[0]
    assert size_model(str(tmp_path), dtype="float16").remarks == ()


def test_the_checkpoint_s_dtype_is_taken(tmp_path: Path) -> None:
    make_config("llama", dtype="bfloat16").save_pretrained(tmp_path)
    assert size_model(str(tmp_path)).dtype == "bfloat16"


def test_a_float16_checkpoint_is_planned_as_it_is_loaded(tmp_path: Path) -> None:
    name = save_model(tmp_path, dtype=torch.float16)
    loaded = load_model(name, device="cpu")
    size = size_model(name)
    assert size.dtype == "float32" == str(loaded.dtype).removeprefix("torch.")
    assert (size.weight_bytes, size.slot_bytes) == (loaded.num_weight_bytes, loaded.slot_bytes)
    assert "float16 checkpoint, which a CPU runs in float32" in size.remarks[0]
    for how in ({"on_gpu": True}, {"dtype": "float16"}):
        assert (size_model(name, **how).dtype, size_model(name, **how).remarks) == ("float16", ())


def test_weights_that_stay_quantized_are_said_to_take_less(tmp_path: Path) -> None:
    quantized = make_config("llama", dtype="bfloat16")
    quantized.quantization_config = {"quant_method": "fp8"}
    quantized.save_pretrained(tmp_path)
    assert "is quantized" in size_model(str(tmp_path)).remarks[0]


def test_a_small_draft_runs_in_fp32_on_some_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "has_streams", lambda _: False)
    name = save_model(tmp_path, dtype="bfloat16")
    loaded = load_draft_model(name, device="cpu")
    assert loaded.dtype == torch.float32
    size = size_draft(name, dtype="auto", on_gpu=False)
    assert size.dtype == "float32"
    assert (size.weight_bytes, size.slot_bytes) == (loaded.num_weight_bytes, loaded.slot_bytes)
    assert size_draft(name, dtype="auto", on_gpu=True).dtype == "bfloat16"
    assert size_draft(name, dtype="bfloat16", on_gpu=False).dtype == "bfloat16"
