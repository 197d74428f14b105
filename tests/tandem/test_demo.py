"""The bundled pair, and growing it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from cluster import bundled
from tandem.demo.corpus import (
    Corpus,
    encode_documents,
    held_out_prompts,
    train_tokenizer,
)
from tandem.demo.early_exit import early_exit_loss, train_early_exit
from tandem.demo.grow import GrownSize, grow, grow_to_folder
from tandem.demo.pair import train_pair
from tandem.demo.retokenize import retokenize_draft
from tandem.demo.training import TrainingOptions, text_loss
from workers.errors import ConfigError
from workers.first_layers import with_first_layers
from workers.vocabulary import compare_vocabularies

MIB = 1024**2
TARGET = bundled.resolve(bundled.TARGET_NAME)
DRAFT = bundled.resolve(bundled.DRAFT_NAME)
EARLY_EXIT = bundled.resolve(bundled.EARLY_EXIT_NAME)


class TestBundledPair:
    def test_names_resolve_to_folders_and_others_to_themselves(self) -> None:
        assert Path(TARGET, "model.safetensors").exists()
        assert Path(DRAFT, "model.safetensors").exists()
        assert bundled.resolve("org/model") == "org/model"

    def test_sizes_are_as_described(self) -> None:
        files = [path for path in bundled.PAIR_FOLDER.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 20 * MIB
        sizes = ((TARGET, 3.5e6, 4.5e6), (EARLY_EXIT, 3.5e6, 4.5e6), (DRAFT, 0.8e6, 1.2e6))
        for folder, low, high in sizes:
            model = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
            assert model.dtype == torch.bfloat16
            assert low < model.num_parameters() < high

    @pytest.mark.parametrize(("name", "least"), [(DRAFT, 0.65), (EARLY_EXIT, 0.5)])
    def test_drafts_agree_with_the_target_as_reported(self, name: str, least: float) -> None:
        """On fewer prompts than the report: within what so few can tell."""
        folder = bundled.PAIR_FOLDER if name == DRAFT else Path(name)
        report = json.loads((folder / "report.json").read_text())
        target = LlamaForCausalLM.from_pretrained(
            TARGET if name == DRAFT else name, dtype=torch.float32
        )
        draft: Any = (
            LlamaForCausalLM.from_pretrained(name, dtype=torch.float32)
            if name == DRAFT
            else with_first_layers(target, report["early_exit_layer"])
        )
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        prompts = tokenizer(
            held_out_prompts(Corpus.load(), 6),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        prompt_len = prompts.input_ids.shape[1]
        output = target.generate(
            prompts.input_ids,
            attention_mask=prompts.attention_mask,
            max_new_tokens=64,
            do_sample=False,
        )
        mask = F.pad(prompts.attention_mask, (0, output.shape[1] - 1 - prompt_len), value=1)
        guesses = draft(output[:, :-1], attention_mask=mask).logits.argmax(-1)
        written = output[:, prompt_len:]
        is_agreed = (guesses[:, prompt_len - 1 :] == written)[written != tokenizer.eos_token_id]
        agreement = float(is_agreed.float().mean())
        assert abs(agreement - report["greedy_agreement"]) < 0.15
        assert min(agreement, report["greedy_agreement"]) >= least


class TestGrow:
    def test_function_is_preserved(self) -> None:
        model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        size = GrownSize(hidden_size=512, intermediate_size=1500, num_layers=7)
        grown = grow(model, size)
        assert grown.num_parameters() > 4 * model.num_parameters()
        tokens = torch.randint(0, 4096, (2, 60), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            difference = (model(tokens).logits - grown(tokens).logits).abs().max()
        assert difference < 1e-4
        assert len(grown.model.layers) == 7

    def test_what_is_new_is_not_zero(self) -> None:
        """Else a benchmark would measure multiplications by nothing."""
        model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        grown = grow(model, GrownSize(hidden_size=512, intermediate_size=1500, num_layers=7))
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(grown.model.layers[0].self_attn, name).weight
            assert (weight == 0).float().mean() < 0.01

    def test_the_default_is_a_287m_model(self) -> None:
        """The parameters are counted by their shapes: no weights are made."""
        model = LlamaForCausalLM.from_pretrained(TARGET).to("meta")
        assert 250e6 < grow(model, GrownSize()).num_parameters() < 300e6

    def test_it_is_written_with_its_tokenizer(self, tmp_path: Path) -> None:
        num_parameters = grow_to_folder(
            TARGET, tmp_path, GrownSize(hidden_size=512, intermediate_size=704, num_layers=4)
        )
        grown = LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert grown.num_parameters() == num_parameters > 8e6
        assert grown.dtype == torch.bfloat16
        assert len(AutoTokenizer.from_pretrained(tmp_path)) == 4096

    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (GrownSize(hidden_size=500), "hidden_size 500 is no multiple of the source's 256"),
            (GrownSize(hidden_size=512, intermediate_size=100), "intermediate_size 100"),
            (GrownSize(hidden_size=512, num_layers=2), "num_layers 2 is less"),
        ],
    )
    def test_impossible_sizes_say_so(self, size: GrownSize, words: str) -> None:
        model = LlamaForCausalLM.from_pretrained(TARGET)
        with pytest.raises(ConfigError, match=words):
            grow(model, size)


class TestCorpus:
    @pytest.fixture(scope="class")
    @classmethod
    def corpus(cls) -> Corpus:
        return Corpus.load()

    def test_held_out_files_are_few_and_never_trained_on(self, corpus: Corpus) -> None:
        training = {document.name for document in corpus.training}
        held_out = {document.name for document in corpus.held_out}
        assert not training & held_out
        assert 10 < len(held_out) < 0.15 * len(training)
        assert "ast.py" in held_out
        assert not [name for name in training | held_out if name.startswith("test/")]

    def test_prompts_are_seeded_and_held_out(self, corpus: Corpus) -> None:
        prompts = held_out_prompts(corpus, 50)
        assert len(prompts) == len(set(prompts)) == 50
        assert prompts == held_out_prompts(corpus, 50)
        assert prompts[:10] == held_out_prompts(corpus, 10)
        texts = [document.text for document in corpus.held_out]
        assert all(any(prompt in text for text in texts) for prompt in prompts)

    def test_tokenizer_and_encoding_are_reproducible(self, corpus: Corpus) -> None:
        few = corpus.training[:20]
        tokenizers = [train_tokenizer(few, 600) for _ in range(2)]
        assert tokenizers[0].to_str() == tokenizers[1].to_str()
        tokens = encode_documents(tokenizers[0], few, seed=1)
        assert np.array_equal(tokens, encode_documents(tokenizers[1], few, seed=1))
        assert (tokens == 0).sum() == len(few)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_products_are_in_bf16_only_where_there_are_kernels(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere each takes many times what it takes in fp32."""
    monkeypatch.setattr("tandem.demo.training.has_kernels", lambda: has_kernels)
    model = LlamaForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    tokens = torch.arange(1, 9)[None]
    expected = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:])
    assert (text_loss(model, tokens) == expected) != has_kernels


@pytest.fixture
def _little_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text, small batches of it, short continuations, and gradients that are not made
    orthogonal: in bf16, that takes most of the time."""
    corpus = Corpus.load()
    short = next(d for d in corpus.held_out if 3_000 < len(d.text) < 5_000)
    few = Corpus(training=corpus.training[:20], held_out=(short,))
    monkeypatch.setattr(Corpus, "load", lambda: few)
    monkeypatch.setattr("tandem.demo.pair.NUM_PROMPT_TOKENS", 496)
    monkeypatch.setattr("tandem.demo.pair.NUM_CONTINUATION_BATCHES", 2)
    monkeypatch.setattr("tandem.demo.pair.CONTINUATION_BATCH_SIZE", 2)
    monkeypatch.setattr("tandem.demo.pair.NUM_AGREEMENT_PROMPTS", 1)
    monkeypatch.setattr("tandem.demo.pair.NUM_AGREEMENT_TOKENS", 16)

    def small_batches(**options: Any) -> TrainingOptions:
        return TrainingOptions(**options | {"batch_tokens": 512})

    monkeypatch.setattr("tandem.demo.training.TrainingOptions", small_batches)
    monkeypatch.setattr("torch.optim.Muon", partial(torch.optim.Muon, ns_steps=0))


@pytest.mark.usefixtures("_little_training")
def test_training_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of everything: files, report, progress bars. What they learn is not the point."""
    report = train_pair(
        tmp_path, target_steps=2, draft_steps=2, seed=0, compile=False, command="test"
    )
    assert json.loads((tmp_path / "report.json").read_text())["seed"] == 0
    assert report.target_held_out_loss < 9
    for name in ("target", "draft"):
        assert (tmp_path / name / "model.safetensors").exists()
    shown = capsys.readouterr().err
    assert "target: 100%" in shown
    assert "loss=" in shown


@pytest.mark.usefixtures("_little_training")
def test_training_to_exit_early_runs_end_to_end(tmp_path: Path) -> None:
    report = train_early_exit(
        tmp_path, early_exit_layer=2, num_steps=2, seed=0, compile=False, command="test"
    )
    assert json.loads((tmp_path / "report.json").read_text())["early_exit_layer"] == 2
    assert report.held_out_loss < report.early_held_out_loss < 12
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == 4096


def test_first_layers_learn_what_the_whole_model_says() -> None:
    """And the whole model learns the text alone: it does not come to meet them."""
    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    early = with_first_layers(model, 1)
    tokens = torch.randint(0, 4096, (1, 30), generator=torch.Generator().manual_seed(0))
    early_exit_loss(model, early, tokens).backward()
    whole = {name: p.grad.clone() for name, p in model.model.layers[3].named_parameters()}
    model.zero_grad()
    text_loss(model, tokens).backward()
    for name, parameter in model.model.layers[3].named_parameters():
        assert torch.allclose(whole[name], parameter.grad, atol=1e-6)


class TestRetokenize:
    def test_a_permuted_draft_says_the_same_in_other_ids(self, tmp_path: Path) -> None:
        retokenize_draft(tmp_path, vocab_size=None, num_steps=0, seed=0, compile=False)
        tokenizers = [AutoTokenizer.from_pretrained(name) for name in (TARGET, tmp_path)]
        drafts = [LlamaForCausalLM.from_pretrained(name) for name in (DRAFT, tmp_path)]
        ids = [tokenizer("def f(x):\n    return ").input_ids for tokenizer in tokenizers]
        assert ids[0] != ids[1]
        new_of = torch.tensor(
            tokenizers[1].convert_tokens_to_ids(tokenizers[0].convert_ids_to_tokens(range(4096)))
        )
        with torch.no_grad():
            ours, theirs = (
                draft(torch.tensor([tokens])).logits
                for draft, tokens in zip(drafts, ids, strict=True)
            )
        assert torch.allclose(ours.float(), theirs[..., new_of].float(), atol=1e-3)
        assert drafts[1].config.eos_token_id == tokenizers[1].eos_token_id
        assert compare_vocabularies(TARGET, str(tmp_path)).method == "intersection"

    @pytest.mark.usefixtures("_little_training")
    def test_a_new_tokenizer_is_another(self, tmp_path: Path) -> None:
        retokenize_draft(tmp_path, vocab_size=400, num_steps=1, seed=0, compile=False)
        found = compare_vocabularies(TARGET, str(tmp_path))
        assert found.method == "retokenize"
        assert found.token_map is not None
        assert found.token_map.share_of_draft > 0.8
