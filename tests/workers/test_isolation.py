"""What one sequence carries ends that sequence alone: the others of its batch are as without it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import save_model
from tests.workers.decoding import CACHE, GREEDY, SAMPLED
from workers.cpu import native
from workers.drafters.model import ModelDrafter
from workers.model import Model, load_model
from workers.sampling import NO_TOKEN, SamplingRow, sample, sample_with_confidence
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import ProposeRequest, VerifyRequest

POISONED_TOKEN = VOCAB_SIZE - 1
PROMPT = (5, 6, 7, 8, 9)
UNSERVABLE = SamplingParams(logit_bias=((-1000, 1.0),))
"""Parameters that no validation lets through, and that sampling cannot apply."""


@pytest.fixture(params=["kernel", "torch"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sampling by the compiled operator, and without one."""
    if request.param == "kernel" and not native.load_operators():
        pytest.skip("this machine compiles no operators")
    if request.param == "torch":
        monkeypatch.setattr("workers.sampling._has_kernel", lambda _: False)
    return iter([None])


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose hidden state is no number from one token on."""
    model = load_model(save_model(tmp_path_factory.mktemp("poisoned"), "llama"), dtype="float32")
    with torch.no_grad():
        model.module.get_input_embeddings().weight[POISONED_TOKEN] = math.nan
    return model


def verify_request(seq_id: str = "good", **changes: Any) -> VerifyRequest:
    request = VerifyRequest(
        seq_id=seq_id,
        base_len=0,
        new_tokens=PROMPT,
        draft_tokens=(1, 2),
        prompt_len=len(PROMPT),
        sampling=SAMPLED,
        seed=7,
    )
    return replace(request, **changes)


def propose_request(seq_id: str = "good", **changes: Any) -> ProposeRequest:
    request = ProposeRequest(
        seq_id=seq_id,
        base_len=0,
        new_tokens=PROMPT,
        k=4,
        prompt_len=len(PROMPT),
        sampling=SAMPLED,
        seed=7,
    )
    return replace(request, **changes)


class LostDevice:
    """A rule whose device has failed."""

    def judge(self, *_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


BAD: dict[str, dict[str, Any]] = {
    "not a number": {"new_tokens": (5, POISONED_TOKEN, 6)},
    "unservable parameters": {"sampling": UNSERVABLE},
    "unknown token": {"new_tokens": (5, VOCAB_SIZE)},
    "negative token": {"new_tokens": (5, -1)},
    "too long": {"new_tokens": (5,) * 1000},
    "no token": {"new_tokens": ()},
    "drafts asked for": {"next_k": 2},
    "no weight": {"new_tokens": (5,) * 20, "weight": 0.0},
    "a weight that is no number": {"new_tokens": (5,) * 20, "weight": math.nan},
}


@pytest.mark.usefixtures("sampler")
class TestTarget:
    @pytest.mark.parametrize("bad", BAD)
    def test_a_bad_sequence_fails_alone(self, bad: str, poisoned: Model) -> None:
        (alone,) = Target(poisoned, CACHE).verify([verify_request()])
        target = Target(poisoned, CACHE)
        first, failed, last = target.verify(
            [
                verify_request(),
                verify_request("bad", **BAD[bad]),
                verify_request("last", sampling=GREEDY),
            ]
        )
        assert first == alone
        assert failed.error
        assert failed.tokens == ()
        assert last.tokens
        assert not last.error
        target.release(["good", "last"])
        assert (target.num_sequences, target.num_used_blocks, target.num_waiting) == (0, 0, 0)
        target.check_integrity()

    def test_the_error_says_what_is_wrong(self, poisoned: Model) -> None:
        batch = [verify_request(bad, **BAD[bad]) for bad in ("not a number", "unknown token")]
        not_a_number, unknown = (result.error for result in Target(poisoned, CACHE).verify(batch))
        assert "not finite numbers at position 3" in not_a_number
        assert unknown == f"token id {VOCAB_SIZE} is unknown to the model; ids go from 0 to 96"

    @pytest.mark.parametrize("bad", BAD)
    def test_whose_fault_it_is_is_told(self, bad: str, poisoned: Model) -> None:
        """A request's own, unless the model or a defect is to blame."""
        every_token = tuple(range(VOCAB_SIZE))
        banned = SamplingParams(min_tokens=9, stop_token_ids=every_token)
        batch = [verify_request("bad", **BAD[bad]), verify_request("banned", sampling=banned)]
        failed, none_left = Target(poisoned, CACHE).verify(batch)
        assert failed.is_refused == (bad not in ("not a number", "unservable parameters"))
        assert none_left.is_refused
        assert "ban fewer tokens" in none_left.error

    def test_a_model_is_to_blame_for_scores_that_are_no_numbers(self, poisoned: Model) -> None:
        banned = SamplingParams(min_tokens=9, stop_token_ids=(1,))
        bad = {**BAD["not a number"], "sampling": banned}
        (failed,) = Target(poisoned, CACHE).verify([verify_request("bad", **bad)])
        assert "not finite numbers" in failed.error
        assert not failed.is_refused

    def test_a_failure_while_planning_ends_one_sequence(
        self, poisoned: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = Target(poisoned, CACHE)
        make_room = target._backlog.make_room

        def fail(sequence: Any, **limits: Any) -> int | None:
            if sequence.seq_id == "bad":
                raise ArithmeticError("a defect")
            return make_room(sequence, **limits)

        monkeypatch.setattr(target._backlog, "make_room", fail)
        bad, good = target.verify([verify_request("bad"), verify_request()])
        assert "internal error" in bad.error
        assert good.tokens

    def test_a_lost_device_ends_the_worker_and_no_sequence(
        self, poisoned: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once a kernel has failed on a GPU, all that follow do: another worker has to serve."""
        target = Target(poisoned, CACHE, early_exit_layer=1)
        with monkeypatch.context() as patch:
            patch.setattr(target, "_rule", LostDevice())
            with pytest.raises(torch.AcceleratorError, match="device-side assert"):
                target.verify([verify_request(), verify_request("last")])
        target.release(["good", "last"])
        monkeypatch.setattr("workers.drafters.early_exit.choose_drafts", LostDevice().judge)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            target.verify([verify_request(next_k=2)])

    @pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64 + 3, 2**200])
    def test_any_integer_is_a_seed(self, seed: int, poisoned: Model) -> None:
        wrapped = (seed + 2**63) % 2**64 - 2**63
        first, second = Target(poisoned, CACHE).verify(
            [verify_request(seed=seed), verify_request("same", seed=wrapped)]
        )
        assert first.tokens == second.tokens

    def test_what_a_failed_sequence_cached_reaches_nobody(self, poisoned: Model) -> None:
        """Neither as a prefix nor as what lies beyond the end of a block that is used again."""
        alone = Target(poisoned, CACHE).verify([verify_request()])
        target = Target(poisoned, CACHE)
        for _ in range(3):
            bad = verify_request("bad", new_tokens=(*PROMPT, POISONED_TOKEN, *PROMPT))
            assert target.verify([bad])[0].error
            assert target.verify([verify_request()]) == alone
            target.release(["good"])


@pytest.mark.usefixtures("sampler")
class TestDrafter:
    def test_only_finite_numbers_are_sent(self, poisoned: Model) -> None:
        (alone,) = ModelDrafter(poisoned, CACHE).propose([propose_request()])
        drafter = ModelDrafter(poisoned, CACHE)
        silent, good = drafter.propose(
            [propose_request("bad", new_tokens=(5, POISONED_TOKEN)), propose_request()]
        )
        assert (silent.draft_tokens, silent.confidences, silent.error) == ((), (), "")
        assert good == alone
        assert all(math.isfinite(confidence) for confidence in good.confidences)

    def test_parameters_that_cannot_be_applied_end_one_sequence(self, poisoned: Model) -> None:
        (alone,) = ModelDrafter(poisoned, CACHE).propose([propose_request()])
        drafter = ModelDrafter(poisoned, CACHE)
        bad, good = drafter.propose(
            [propose_request("bad", sampling=UNSERVABLE), propose_request()]
        )
        assert bad.error
        assert good == alone
        drafter.release(["good"])
        assert (drafter.num_sequences, drafter.num_used_blocks) == (0, 0)

    def test_tokens_that_only_the_target_has_are_stood_in_for(
        self, tiny_model: Callable[..., Model]
    ) -> None:
        """Vocabularies of one family differ in their padding, and in a few added tokens."""
        penalised = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4)
        drafter = ModelDrafter(tiny_model("llama"), CACHE)
        unknown = propose_request(
            "unknown", new_tokens=(5, VOCAB_SIZE, 4000, 6), sampling=penalised, prompt_len=2
        )
        result, good = drafter.propose([unknown, propose_request()])
        assert len(result.draft_tokens) == len(result.confidences) == unknown.k
        assert not result.error
        (again,) = drafter.propose(
            [replace(unknown, base_len=4, new_tokens=(*result.draft_tokens[:2], VOCAB_SIZE + 5))]
        )
        assert len(again.draft_tokens) == unknown.k
        (alone,) = ModelDrafter(tiny_model("llama"), CACHE).propose([propose_request()])
        assert good == alone


@pytest.mark.usefixtures("sampler")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_rows_without_a_finite_highest_score_decide_no_token(
    score: float, params: SamplingParams
) -> None:
    logits = torch.randn(3, 50)
    logits[1] = score
    rows = [SamplingRow(params=params, seed=1, position=2) for _ in range(3)]
    tokens = sample(logits, rows)
    assert tokens[1] == NO_TOKEN
    assert tokens[::2] == sample(logits[::2], rows[::2])
    same, confidences = sample_with_confidence(logits, rows)
    assert same == tokens
    assert all(0.0 < confidences[row] <= 1.0 for row in (0, 2))
