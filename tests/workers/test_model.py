"""The paged, flattened forward against the model's own, and what cannot be served."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from tests.tiny_configs import SERVED, VOCAB_SIZE, WRAPPED
from tests.tiny_models import UNSUPPORTED, make_config, save_model
from workers.cpu.kernel import CpuKernel
from workers.cpu.packed_linear import has_streams
from workers.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from workers.model import Model, load_model
from workers.state_slots import BEGINNING, StateMoves, StateSlots, num_slots
from workers.step_inputs import step_inputs
from workers.step_plan import StepPlan

BLOCK_SIZE = 4
SEQUENCE_LENS = (17, 9, 30)
# Blocks out of order and interleaved, as a busy allocator leaves them.
BLOCK_TABLES = ([5, 1, 9, 30, 12], [2, 8, 3], [40, 41, 7, 6, 20, 21, 50, 51])
# New tokens per sequence and step: prefills, a long and a short chunk together, single tokens.
STEPS = ((10, 0, 18), (3, 5, 1), (1, 1, 1), (3, 3, 10))
ONE_BY_ONE = tuple(
    tuple(int(turn == index) for index in range(len(SEQUENCE_LENS)))
    for turn, length in enumerate(SEQUENCE_LENS)
    for _ in range(length)
)


def random_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in SEQUENCE_LENS
    ]


def state_moves(index: int, num_cached: int) -> StateMoves:
    """The moves of states by a chunk of committed tokens."""
    slots = StateSlots.of(index)
    read = slots.committed if num_cached else BEGINNING
    return StateMoves(read=read, slots=slots, num_drafts=0)


def paged_logits(
    model: Model, sequences: list[list[int]], steps: Sequence[Sequence[int]] = STEPS
) -> list[torch.Tensor]:
    """Logits of every position, run in steps over a shared cache."""
    layers = model.make_cache(num_blocks=64, block_size=BLOCK_SIZE)
    for layer in layers:  # what was never written must not matter
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    states = model.make_states(num_slots(len(sequences)))
    for state in states.values():
        state[BEGINNING + 1 :] = float("nan")
    done = [0, 0, 0]
    logits: list[list[torch.Tensor]] = [[], [], []]
    for step in steps:
        order = [index for index in (2, 0, 1) if step[index]]
        plan = StepPlan()
        for index in order:
            plan.add_chunk(
                sequences[index][done[index] : done[index] + step[index]],
                cached_len=done[index],
                block_table=BLOCK_TABLES[index],
                num_logits=step[index],
                states=state_moves(index, done[index]) if states else None,
            )
            done[index] += step[index]
        inputs = step_inputs(
            plan,
            layers,
            vocab_size=model.vocab_size,
            block_size=BLOCK_SIZE,
            device=model.device,
            states=states,
        )
        rows = model.forward(inputs).split([chunk.num_new for chunk in plan.chunks])
        for index, row in zip(order, rows, strict=True):
            logits[index].append(row)
    assert done == list(SEQUENCE_LENS)
    return [torch.cat(pieces) for pieces in logits]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mpt"])
def test_logits_are_the_same_in_any_batch(
    family: str, dtype: torch.dtype, tiny_model: Callable[..., Model]
) -> None:
    """So that drafts, and who else is served, change no text even in bf16: bit for bit."""
    if not has_streams(dtype):
        pytest.skip("needs products that do not know the batch")
    name = str(dtype).removeprefix("torch.")
    model = load_model(tiny_model(family).name, dtype=name, device="cpu")
    sequences = random_sequences()
    together, alone = paged_logits(model, sequences), paged_logits(model, sequences, ONE_BY_ONE)
    for of_batch, of_single_tokens in zip(together, alone, strict=True):
        assert torch.equal(of_batch, of_single_tokens)


@pytest.mark.parametrize("family", sorted(SERVED))
def test_paged_forward_equals_the_models_own(
    family: str,
    tiny_model: Callable[..., Model],
    reference: Callable[[Model], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By our kernel, and without it."""
    model = tiny_model(family)
    sequences = random_sequences()
    own = reference(model)
    by_kernel = paged_logits(model, sequences)
    monkeypatch.setattr(CpuKernel, "find", lambda *_, **__: None)
    gathered = paged_logits(model, sequences)
    for index, sequence in enumerate(sequences):
        with torch.no_grad():
            expected = own(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
        assert expected.std() > 0.01
        # a recurrence in chunks and token by token is not the same sum
        tolerance = 1e-4 if model.state_specs else 1e-5
        for paged in (by_kernel[index], gathered[index]):
            torch.testing.assert_close(paged, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", WRAPPED)
def test_what_a_wrapper_has_for_pictures_takes_no_memory(
    family: str,
    tiny_model: Callable[..., Model],
    reference: Callable[[Model], PreTrainedModel],
) -> None:
    """Its tower, and what makes embeddings of what the tower gives."""
    model = tiny_model(family)
    whole = reference(model)
    needed = {*whole.get_decoder().parameters(), *whole.get_output_embeddings().parameters()}
    assert model.num_weight_bytes == sum(weight.nbytes for weight in needed)
    assert not [name for name, _ in model.module.named_modules() if "vision" in name]


@pytest.mark.parametrize("family", sorted(UNSUPPORTED))
def test_unsupported_architectures_say_so(family: str, tmp_path: Path) -> None:
    name = save_model(tmp_path, family)
    with pytest.raises(UnsupportedModelError, match=family) as caught:
        load_model(name, dtype="float32", device="cpu")
    assert str(tmp_path) in str(caught.value)


def test_missing_folder_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="'/nowhere/model': there is no such folder"):
        load_model("/nowhere/model")


def test_unknown_id_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="'nobody/nothing' was not found"):
        load_model("nobody/nothing")


def test_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises((ModelNotFoundError, UnsupportedModelError), match=str(tmp_path)):
        load_model(str(tmp_path))


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, num_decoder_layers=1
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        load_model(str(tmp_path))


def test_checkpoint_without_a_causal_head_is_refused(tmp_path: Path) -> None:
    config = make_config("llama", tie_word_embeddings=False)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"no causal language model.*lm_head"):
        load_model(str(tmp_path))


def test_bad_dtype_and_device_name_the_choices(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    with pytest.raises(ConfigError, match=r"dtype is 'int7'.*'bfloat16'"):
        load_model(name, dtype="int7")
    with pytest.raises(ConfigError, match="device is 'abacus'"):
        load_model(name, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            load_model(name, device="cuda")


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(make_config("llama")).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.bfloat16
    assert load_model(str(tmp_path), dtype="float32", device="cpu").dtype == torch.float32


def test_length_dependent_rope_limits_the_context(tmp_path: Path) -> None:
    """Beyond the original length, one long sequence would change the angles of all others."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    name = save_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert load_model(name, dtype="float32", device="cpu").max_position == 64
