"""Early exit: the target's first layers draft for the next round, and change nothing."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

from tests.grammars import save_grammar_model
from tests.tiny_configs import MAX_POSITION, RARE, RECURRENT, SUPPORTED, WRAPPED
from tests.tiny_models import make_config, save_model
from tests.workers.decoding import CACHE, GREEDY, PENALISED, SAMPLED, generate, make_prompt
from workers.cache_size import GIB
from workers.draft_law import read_law
from workers.drafters import early_exit
from workers.errors import ConfigError
from workers.first_layers import check_first_layers, first_layers
from workers.grammar import Grammar
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import NO_DRAFTS, DraftTokens, SamplingParams, VerifyRequest, VerifyResult

LoadModel = Callable[..., Model]


@dataclass
class Writer:
    """A router for one sequence, which verifies the drafts that its target made itself."""

    target: Target
    prompt: Sequence[int]
    next_k: int = 4
    seq_id: str = "s"
    options: dict[str, Any] = field(default_factory=dict)
    drafts: DraftTokens = NO_DRAFTS
    results: list[VerifyResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, self.cached_len = list(self.prompt), 0

    def request(self) -> VerifyRequest:
        return VerifyRequest(
            seq_id=self.seq_id,
            base_len=self.cached_len,
            new_tokens=tuple(self.tokens[self.cached_len :]),
            draft_tokens=self.drafts.tokens,
            draft_law=self.drafts.law,
            prompt_len=len(self.prompt),
            next_k=self.next_k,
            **{"seed": 1, **self.options},
        )

    def take(self, result: VerifyResult) -> None:
        assert not result.error, result.error
        if result.needs_tokens_from is not None:
            self.cached_len = result.needs_tokens_from
            return
        self.results.append(result)
        self.cached_len = len(self.tokens) + result.num_accepted
        self.tokens += result.tokens
        self.drafts = result.next_drafts

    def round(self) -> VerifyResult:
        (result,) = self.target.verify([self.request()])
        self.target.check_integrity()
        self.take(result)
        return result

    def write(self, num_tokens: int) -> list[int]:
        while len(self.tokens) < len(self.prompt) + num_tokens:
            self.round()
        self.target.release([self.seq_id])
        return self.tokens[len(self.prompt) : len(self.prompt) + num_tokens]

    @property
    def num_accepted(self) -> int:
        return sum(result.num_accepted for result in self.results)

    @property
    def num_tested(self) -> int:
        return sum(result.num_tested for result in self.results)


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


ALIKE = ("qwen2", "phi3", "olmo2", "cohere", "granite", "starcoder2", "olmoe", "phimoe")
"""Families whose layers are one list in one place as llama's and mixtral's, and of one kind."""


class TestFirstLayers:
    @pytest.mark.parametrize(
        "family", [name for name in (*SUPPORTED, *RARE, *WRAPPED) if name not in ALIKE]
    )
    def test_they_are_a_model_of_so_many_layers(
        self,
        family: str,
        tiny_model: LoadModel,
        reference: Callable[[Model], PreTrainedModel],
    ) -> None:
        self.check(tiny_model(family), reference, family)

    def test_so_they_are_where_layers_are_alike(
        self,
        has_all_combinations: bool,
        tiny_model: LoadModel,
        reference: Callable[[Model], PreTrainedModel],
    ) -> None:
        """Of all families, or of one dense one and one of experts."""
        for family in ALIKE if has_all_combinations else ("phi3", "olmoe"):
            self.check(tiny_model(family), reference, family)

    def check(
        self, model: Model, reference: Callable[[Model], PreTrainedModel], family: str
    ) -> None:
        """The logits are what transformers makes of the same weights with so few layers."""
        shallow_config = make_config(family)
        text_config: Any = shallow_config.get_text_config()
        text_config.num_hidden_layers = num_layers = text_config.num_hidden_layers - 1
        if getattr(text_config, "layer_types", None):
            text_config.layer_types = text_config.layer_types[:-1]
        whole: Any = reference(model)
        shallow = type(whole)(shallow_config).eval()
        shallow.load_state_dict(whole.state_dict(), strict=False)
        prompt = make_prompt(3, 15)
        target = Target(model, CACHE, early_exit_layer=num_layers)
        writer = Writer(target, prompt, next_k=3, options={"sampling": GREEDY})
        drafts = writer.round().next_drafts
        text = writer.tokens[:]
        for draft in drafts.tokens:
            logits = shallow(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            assert draft == int(logits.argmax())
            text.append(draft)
        assert len(drafts.tokens) == 3
        assert generate(target, prompt, 2) == generate(Target(model, CACHE), prompt, 2)

    def test_the_model_stays_as_it_was(self, tiny_model: LoadModel) -> None:
        model = tiny_model("gemma2")
        config = copy.deepcopy(model.module.config.to_dict())
        early = first_layers(model, 1)
        assert model.module.config.to_dict() == config
        assert early.module.config.num_hidden_layers == 1
        assert (len(model.module.model.layers), len(early.module.model.layers)) == (3, 1)
        assert early.module.model.layers[0] is model.module.model.layers[0]
        assert early.slot_bytes * 3 == model.slot_bytes

    @pytest.mark.parametrize("layer", [0, 3, 9, -1])
    def test_there_have_to_be_so_many_and_more(self, layer: int, tiny_model: LoadModel) -> None:
        model = tiny_model()
        with pytest.raises(ConfigError) as caught:
            Target(model, CACHE, early_exit_layer=layer)
        sentence = f"early_exit_layer is {layer}, but {model.name!r} has 3 layers; it must be from "
        assert str(caught.value) == f"{sentence}1 to 2"

    @pytest.mark.parametrize("family", RECURRENT)
    def test_recurrent_layers_do_not_draft(self, family: str) -> None:
        with pytest.raises(ConfigError, match=r"early_exit_layer is 2, but 'x' has recurrent lay"):
            check_first_layers("x", make_config(family), 2)

    def test_layers_that_do_not_run_without_the_others_do_not_draft(
        self, tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = LlamaModel.forward

        def run_and_look_at_the_last(self: Any, *args: Any, **kwargs: Any) -> Any:
            assert self.layers[2] is not None
            return run(self, *args, **kwargs)

        monkeypatch.setattr(LlamaModel, "forward", run_and_look_at_the_last)
        model = tiny_model()
        sentence = (
            rf"the first 2 layers of '{model.name}' do not run without the others, so they cannot "
            "draft; use another drafter than early_exit: .*IndexError"
        )
        with pytest.raises(ConfigError, match=sentence):
            Target(model, CACHE, early_exit_layer=2)

    def test_layers_that_are_in_no_list_do_not_draft(self, tmp_path: Path) -> None:
        model = load_model(save_model(tmp_path), device="cpu")
        model.module.model.layers = torch.nn.Sequential(*model.module.model.layers)
        sentence = (
            "LlamaForCausalLM has its layers in no list, so that the first 1 cannot be told apart; "
            "use another drafter than early_exit"
        )
        with pytest.raises(ConfigError, match=sentence):
            Target(model, CACHE, early_exit_layer=1)

    def test_a_target_without_early_exit_makes_no_drafts(self, tiny_model: LoadModel) -> None:
        request = Writer(Target(tiny_model(), CACHE), make_prompt(1, 5)).request()
        (result,) = Target(tiny_model(), CACHE).verify([request])
        assert result.error == "next_k is 4, but this target makes no drafts; it must be 0"


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
