"""Early exit: the target's first layers draft for the next round, and change nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.grammars import save_grammar_model
from tests.tiny_configs import MAX_POSITION
from tests.tiny_models import save_model
from tests.workers.decoding import CACHE, GREEDY, PENALISED, SAMPLED, generate, make_prompt
from tests.workers.writer import Writer
from workers.cache_size import GIB
from workers.draft_law import read_law
from workers.drafters import early_exit
from workers.grammar import Grammar
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import NO_DRAFTS, DraftTokens

LoadModel = Callable[..., Model]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose layers do nothing, but for the first."""
    folder = tmp_path_factory.mktemp("idle")
    name = save_model(folder)
    module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    with torch.no_grad():
        for layer in module.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    module.save_pretrained(folder)
    return load_model(name, dtype="float32", device="cpu")


class TestExactness:
    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=str)
    def test_texts_are_those_of_plain_decoding(
        self, sampling: SamplingParams, tiny_model: LoadModel
    ) -> None:
        prompt = make_prompt(2, 21)
        plain = generate(Target(tiny_model(), CACHE), prompt, 14, sampling=sampling)
        for next_k in (1, 2, 9):
            target = Target(tiny_model(), CACHE, early_exit_layer=2)
            writer = Writer(target, prompt, next_k=next_k, options={"sampling": sampling})
            assert writer.write(14) == plain, next_k
            assert writer.num_tested > 0
            assert target.num_used_blocks == 0

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
    def test_drafts_are_the_targets_own_where_the_upper_layers_do_nothing(
        self, sampling: SamplingParams, idle: Model
    ) -> None:
        """So the positions, the cache and the noise are the target's."""
        target = Target(idle, CACHE, early_exit_layer=1)
        writer = Writer(target, make_prompt(4, 9), options={"sampling": sampling})
        text = writer.write(30)
        assert text == generate(Target(idle, CACHE), writer.prompt, 30, sampling=sampling)
        assert writer.num_accepted == writer.num_tested == 4 * (len(writer.results) - 1)

    def test_many_sequences_with_and_without_drafts(self, tiny_model: LoadModel) -> None:
        """In one batch: of several lengths, greedy and sampled, some of other drafters."""
        model = tiny_model()
        target = Target(model, CACHE, early_exit_layer=1)
        writers = [
            Writer(
                target,
                make_prompt(index, 3 + 5 * index),
                next_k=index % 4,
                seq_id=f"s{index}",
                options={"sampling": GREEDY if index % 2 else SAMPLED, "seed": index},
            )
            for index in range(6)
        ]
        for number in range(15):
            for writer, result in zip(
                writers, target.verify([w.request() for w in writers]), strict=True
            ):
                writer.take(result)
            if number % 3 == 0:  # another drafter has spoken
                writers[0].drafts = DraftTokens(tokens=(5, 6, 7))
            target.check_integrity()
        for index, writer in enumerate(writers):
            text = writer.tokens[len(writer.prompt) :]
            assert text == generate(
                Target(model, CACHE), writer.prompt, len(text), seed=index,
                sampling=writer.options["sampling"],
            )  # fmt: skip

    def test_prefixes_that_are_shared_hold_no_drafts(self, tiny_model: LoadModel) -> None:
        """A text is written with drafts; others that begin like it find its blocks."""
        model, prompt = tiny_model(), make_prompt(5, 18)
        target = Target(model, CACHE, early_exit_layer=2)
        text = Writer(target, prompt, next_k=7).write(26)
        for length in (4, 11, 17, 26):
            longer = [*prompt, *text[:length]]
            found_before = target.num_prefix_tokens
            writer = Writer(target, longer, next_k=3, options={"sampling": SAMPLED})
            expected = generate(
                Target(model, replace(CACHE, prefix_caching=False)), longer, 10, sampling=SAMPLED
            )
            assert writer.write(10) == expected
            assert target.num_prefix_tokens > found_before


class TestDrafts:
    def test_there_are_as_many_as_the_context_has_room_for(self, tiny_model: LoadModel) -> None:
        """The newest token and the drafts behind it have to fit."""
        target = Target(tiny_model(), CACHE, early_exit_layer=1)
        writer = Writer(target, make_prompt(1, MAX_POSITION - 5), next_k=9)
        num_drafts = []
        while len(writer.tokens) < MAX_POSITION:
            num_drafts.append(len(writer.round().next_drafts.tokens))
            writer.drafts = NO_DRAFTS
        assert num_drafts == [4, 3, 2, 1, 0]

    def test_nobody_gives_way_to_them(self, tiny_model: LoadModel) -> None:
        """Where blocks have run out, there are as many as the last ones have room for."""
        model = tiny_model()
        cache = CacheOptions(
            block_size=4, max_model_len=24, kv_cache_gib=6 * 4 * model.slot_bytes / GIB
        )
        target = Target(model, cache, early_exit_layer=1)
        writers = [Writer(target, make_prompt(n, n), seq_id=str(n)) for n in (14, 7)]
        results = target.verify([writer.request() for writer in writers])
        assert [len(result.next_drafts.tokens) for result in results] == [2, 1]
        assert (target.num_sequences, target.num_preemptions) == (2, 0)
        target.check_integrity()

    def test_they_end_where_they_are_not_sure(self, tiny_model: LoadModel) -> None:
        target = Target(tiny_model(), CACHE, early_exit_layer=1)
        whole = Writer(target, make_prompt(6, 8), next_k=6).round().next_drafts
        assert len(whole.confidences) == len(whole.tokens) == 6
        assert all(0.0 < confidence <= 1.0 for confidence in whole.confidences)
        least = whole.confidences[0] * whole.confidences[1] + 1e-9
        cut = Writer(
            target, make_prompt(6, 8), next_k=6, seq_id="t", options={"next_stop_below": least}
        )
        assert cut.round().next_drafts == whole.first(2)

    def test_they_end_behind_one_that_is_hardly_possible(
        self, tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hopeless = early_exit.Draft(token=5, confidence=0.0)
        monkeypatch.setattr(early_exit, "choose_drafts", lambda draws, _: [hopeless for _ in draws])
        target = Target(tiny_model(), CACHE, early_exit_layer=1)
        writer = Writer(target, make_prompt(6, 8), next_k=6, options={"next_stop_below": 0.5})
        assert writer.round().next_drafts.tokens == (5,)

    @pytest.mark.parametrize("rule", ["rejection", "block"])
    def test_rules_that_compare_laws_are_told_them(self, rule: str, idle: Model) -> None:
        target = Target(idle, CACHE, early_exit_layer=1)
        writer = Writer(target, make_prompt(7, 8), options={"verification": rule})
        drafts = writer.round().next_drafts
        assert drafts.confidences == ()
        for law, token in zip(drafts.law, drafts.tokens, strict=True):
            assert token in read_law(law, token).tokens
            assert len(read_law(law, token).tokens) > 1
        writer.write(50)
        # the law is the target's own, but for what a sparse one leaves out
        assert writer.num_accepted > 0.9 * writer.num_tested

    def test_what_one_of_them_raises_ends_its_drafts_alone(
        self, tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        choose = early_exit.choose_drafts

        def raising(draws: Any, logits: torch.Tensor) -> Any:
            if any(each.row.seed == 13 for each in draws):
                raise ZeroDivisionError
            return choose(draws, logits)

        monkeypatch.setattr(early_exit, "choose_drafts", raising)
        target = Target(tiny_model(), CACHE, early_exit_layer=1)
        good, bad = (
            Writer(target, make_prompt(8, 6), seq_id=str(seed), options={"seed": seed})
            for seed in (12, 13)
        )
        results = target.verify([good.request(), bad.request()])
        assert [len(result.next_drafts.tokens) for result in results] == [4, 0]
        assert [len(result.tokens) for result in results] == [1, 1]
        target.check_integrity()

    def test_a_grammar_holds_for_them_too(self, tmp_path: Path) -> None:
        model = load_model(save_grammar_model(tmp_path), dtype="float32", device="cpu")
        grammar = Grammar.regex("(ab|cd)+")
        target = Target(model, CACHE, early_exit_layer=1)
        sampling = SamplingParams(temperature=0.0, grammar=grammar)
        writer = Writer(target, [5, 6, 7], options={"sampling": sampling})
        writer.write(12)
        # behind an "a" comes a "b", and behind a "c" a "d": half of all drafts cannot be wrong
        assert writer.num_accepted >= 0.5 * writer.num_tested > 0
