"""Models that are quantized as they are loaded: whatever the drafts, their texts are their own."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster import bundled
from cluster.plan.model_size import size_model
from tandem.live.texts import make_prompts
from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import edit_json, save_model
from tests.workers.decoding import CACHE, GREEDY, SAMPLED, generate, make_prompt
from workers import quantization
from workers.cpu.packed_linear import has_streams
from workers.drafters.model import load_draft_model
from workers.errors import ConfigError, UnsupportedModelError
from workers.loading import load_weights
from workers.model import Model, load_config, load_model
from workers.quantization import PACKAGES_OF, Quantization
from workers.quantizing import loading_options, settle
from workers.sampling_params import SamplingParams
from workers.step_inputs import step_inputs
from workers.step_plan import StepPlan
from workers.target import Target
from workers.tokenizer import find_tokenizer

NUM_TOKENS = 14


def needs_package(how: Quantization) -> Any:
    package = PACKAGES_OF[how]
    is_missing = not quantization.is_installed(package)
    return pytest.param(how, marks=pytest.mark.skipif(is_missing, reason=f"needs {package}"))


of_quantizations = pytest.mark.parametrize("how", [needs_package(how) for how in PACKAGES_OF])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers' inputs are whole blocks of 4 bits, and too many for one tile."""
    wide = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
    return save_model(tmp_path_factory.mktemp("wide"), "qwen2", **wide)


@pytest.fixture(scope="module")
def load(folder: str) -> Callable[[Quantization, str], Model]:
    made: dict[tuple[Quantization, str], Model] = {}

    def load_once(how: Quantization, dtype: str) -> Model:
        if (how, dtype) not in made:
            made[how, dtype] = load_model(folder, dtype=dtype, device="cpu", quantization=how)
        return made[how, dtype]

    return load_once


@of_quantizations
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("bfloat16", marks=pytest.mark.skipif(
            not has_streams(torch.bfloat16), reason="the head's products are not our own here"
        )),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(
    sampling: SamplingParams, dtype: str, how: Quantization, load: Callable[..., Model]
) -> None:
    """The drafts are right, wrong, or right at first."""
    target = Target(load(how, dtype), CACHE)
    prompt = make_prompt(1, 9)
    plain = generate(target, prompt, NUM_TOKENS, sampling=sampling)
    nums_right = itertools.cycle((0, 2, 7))

    def drafts(_: str, tokens: Sequence[int]) -> list[int]:
        done = len(tokens) - len(prompt)
        noise = random.Random(done).choices(range(VOCAB_SIZE), k=3)
        return [*plain[done : done + next(nums_right)], *noise]

    assert generate(target, prompt, NUM_TOKENS, sampling=sampling, drafts=drafts) == plain


@of_quantizations
def test_a_row_s_logits_do_not_depend_on_the_step(how: Quantization, load: Any) -> None:
    """Where products are the packages' own too, as in 8 bits by bitsandbytes."""
    module = load(how, "float32").module
    if how != "bnb_int8" and not has_streams(torch.float32):
        pytest.skip("this CPU has no use for our products")
    layer = module.model.layers[1].mlp.down_proj
    inputs = torch.randn(40, layer.in_features)
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in inputs])
        for num_rows in (2, 5, 13, 40):
            assert torch.equal(layer(inputs[:num_rows]), alone[:num_rows])


@of_quantizations
def test_logits_are_those_of_the_package(how: Quantization, folder: str, load: Any) -> None:
    """Our products in place of the package's own change nothing but the last digits."""
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **loading_options(how, torch.float32)
    )
    settle(reference)
    prompt = make_prompt(2, 12)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    (token,) = generate(Target(load(how, "float32"), CACHE), prompt, 1)
    assert logits[token] >= logits.max() - 1e-3 * logits.std()


@of_quantizations
def test_weights_take_less(how: Quantization, load: Callable[..., Model]) -> None:
    """That is what a worker says of itself."""
    quantized, plain = (Target(load(how, "float32"), CACHE).info for how in (how, "none"))
    assert (quantized.quantization, plain.quantization) == (how, "none")
    assert 0 < quantized.weight_bytes < 0.5 * plain.weight_bytes


@of_quantizations
def test_layers_that_have_no_kernel_stay_as_they_are(how: Quantization, tmp_path: Path) -> None:
    """30 inputs are neither lines of int8 nor blocks of 4 bits."""
    odd = {"hidden_size": 36, "intermediate_size": 30, "num_attention_heads": 2, "head_dim": 18}
    name = save_model(tmp_path, "qwen3", **odd, num_key_value_heads=1)
    target = Target(load_model(name, dtype="float32", device="cpu", quantization=how), CACHE)
    prompt = make_prompt(1, 9)
    plain = generate(target, prompt, 12)
    drafts = lambda _, tokens: plain[len(tokens) - len(prompt) :][:3]  # noqa: E731
    assert generate(target, prompt, 12, drafts=drafts) == plain


@of_quantizations
def test_recurrent_layers_are_quantized_too(
    how: Quantization, has_all_combinations: bool, tmp_path: Path
) -> None:
    """Each way takes two families in its turn, or all of them."""
    families, turn = ("qwen3_5", "bamba", "lfm2", "jamba"), [*PACKAGES_OF].index(how)
    for family in families if has_all_combinations else (families[turn], families[turn + 1]):
        check_recurrent_layers(family, how, tmp_path / family)


def check_recurrent_layers(family: str, how: Quantization, folder: Path) -> None:
    """Its linear layers are quantized, and neither convolutions nor states: after rejections, what
    was accepted is run again, in another batch."""
    name = save_model(folder, family)
    model = load_model(name, dtype="float32", device="cpu", quantization=how)
    assert (
        model.num_weight_bytes == size_model(name, quantization=how, dtype="float32").weight_bytes
    )
    prompt, rng = make_prompt(3, 21), random.Random(0)
    plain = generate(Target(model, CACHE), prompt, NUM_TOKENS, sampling=SAMPLED)

    def drafts(_: str, tokens: Sequence[int]) -> list[int]:
        right = plain[len(tokens) - len(prompt) :][: rng.randrange(5)]
        return [*right, *rng.choices(range(VOCAB_SIZE), k=rng.randrange(4))]

    target = Target(model, CACHE, max_batched_tokens=16)
    options = {"sampling": SAMPLED, "drafts": drafts, "forget_every": 4}
    assert generate(target, prompt, NUM_TOKENS, **options) == plain


@of_quantizations
def test_a_draft_is_quantized_by_itself(how: Quantization, folder: str) -> None:
    assert load_draft_model(folder, device="cpu").quantization == "none"
    assert load_draft_model(folder, device="cpu", quantization=how).quantization == how


@pytest.mark.parametrize("how", PACKAGES_OF)
def test_a_missing_package_is_named(
    how: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.quantizing.is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=f"'{how}', which needs the package {PACKAGES_OF[how]}"):
        load_model(save_model(tmp_path), device="cpu", quantization=how)


def test_what_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(tmp_path / "config.json", quantization_config=fp8)
    with pytest.raises(ConfigError, match=r"are quantized already \(fp8\); leave the option out"):
        load_model(name, device="cpu", quantization="int8")


@pytest.mark.parametrize("read", [load_model, size_model])
def test_a_model_of_which_nothing_would_be_quantized_is_refused(
    read: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the same model under another name, at load and when it is planned."""
    monkeypatch.setattr("workers.quantizing.is_installed", lambda _: True)
    sentence = (
        r"\(gpt2\) has no layers of the kind that torchao quantizes, so int8 would leave it as it "
        "is; use bnb_int8 or bnb_nf4, or no quantization"
    )
    with pytest.raises(UnsupportedModelError, match=sentence):
        read(save_model(tmp_path, "gpt2"), quantization="int8")


def test_a_model_whose_code_fails_with_quantized_layers_is_refused(tmp_path: Path) -> None:
    if not quantization.is_installed("bitsandbytes"):
        pytest.skip("needs bitsandbytes")
    name = save_model(tmp_path, "kimi_linear")
    sentence = (
        r"\(kimi_linear\) cannot be served: it fails over a paged cache .*; its weights were "
        r"quantized \(quantization bnb_int8\): use another one, or none"
    )
    with pytest.raises(UnsupportedModelError, match=sentence):
        load_model(name, device="cpu", quantization="bnb_int8")


def test_a_device_that_bitsandbytes_has_nothing_for(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.quantizing.is_installed", lambda _: True)
    monkeypatch.setattr("workers.quantizing._devices_of_bitsandbytes", lambda: {"cuda"})
    config = load_config(folder)
    with pytest.raises(ConfigError, match="has nothing for 'cpu'; use quantization=int8"):
        load_weights(folder, config, torch.float32, torch.device("cpu"), 1, "bnb_nf4")


# Acceptance

NUM_PROMPTS, PROMPT_LEN, TEXT_LEN = 80, 32, 64
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def written() -> list[list[int]]:
    """Held-out code, and how the bundled target goes on, greedily."""
    name = bundled.resolve(bundled.TARGET_NAME)
    tokenizer: Any = find_tokenizer(name)
    prompts = [tokenizer.encode(prompt) for prompt in make_prompts("easy", 2 * NUM_PROMPTS)]
    long_enough = [prompt[:PROMPT_LEN] for prompt in prompts if len(prompt) >= PROMPT_LEN]
    module: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    texts: list[list[int]] = module.generate(
        torch.tensor(long_enough[:NUM_PROMPTS]),
        attention_mask=torch.ones(NUM_PROMPTS, PROMPT_LEN, dtype=torch.long),
        max_new_tokens=TEXT_LEN,
        min_new_tokens=TEXT_LEN,
        do_sample=False,
    ).tolist()
    return texts


@pytest.fixture(scope="module")
def draft_laws(written: list[list[int]]) -> Callable[[Quantization], Tensor]:
    """By how it is quantized, what the bundled draft says in a step of its own of all texts."""

    @torch.inference_mode()
    def read(how: Quantization) -> Tensor:
        name = bundled.resolve(bundled.DRAFT_NAME)
        model = load_draft_model(name, dtype="float32", device="cpu", quantization=how)
        num_blocks = -(-len(written[0]) // BLOCK_SIZE)
        plan = StepPlan()
        for index, text in enumerate(written):
            blocks = range(index * num_blocks, (index + 1) * num_blocks)
            plan.add_chunk(text[:-1], cached_len=0, block_table=blocks, num_logits=TEXT_LEN)
        inputs = step_inputs(
            plan,
            model.make_cache(NUM_PROMPTS * num_blocks, BLOCK_SIZE),
            vocab_size=model.vocab_size,
            block_size=BLOCK_SIZE,
            device=model.device,
        )
        return model.forward(inputs).softmax(dim=-1).view(NUM_PROMPTS, TEXT_LEN, -1)

    return cache(read)


@of_quantizations
def test_a_quantized_draft_guesses_nearly_as_many_tokens(
    how: Quantization, written: list[list[int]], draft_laws: Callable[[Quantization], Tensor]
) -> None:
    """What is likeliest to the draft, given what is before each token, is the target's choice."""
    continued = torch.tensor(written)[:, PROMPT_LEN:]
    plain, quantized = (
        (draft_laws(each).argmax(dim=-1) == continued).double().mean(dim=-1)
        for each in ("none", how)
    )
    assert plain.mean() > 0.6
    lost = plain - quantized
    assert lost.std() / NUM_PROMPTS**0.5 < 0.01
    assert lost.mean() < 0.05


@pytest.fixture(scope="module")
def target_laws(written: list[list[int]]) -> Tensor:
    """What may come where in each text, by transformers' own forward."""
    module: Any = AutoModelForCausalLM.from_pretrained(
        bundled.resolve(bundled.TARGET_NAME), dtype=torch.float32
    )
    with torch.inference_mode():
        logits: Tensor = module(torch.tensor(written), use_cache=False).logits
        return logits[:, PROMPT_LEN - 1 : -1].softmax(dim=-1)


@of_quantizations
def test_a_quantized_draft_is_accepted_nearly_as_often(
    how: Quantization, target_laws: Tensor, draft_laws: Callable[[Quantization], Tensor]
) -> None:
    """Where texts are sampled: by the ratio test, the sum of min(p, q) behind each token."""
    plain, quantized = (
        torch.minimum(target_laws, draft_laws(each)).sum(dim=-1).mean(dim=-1)
        for each in ("none", how)
    )
    lost = plain - quantized
    assert lost.std() / NUM_PROMPTS**0.5 < 0.01
    assert lost.mean() < 0.05
