"""How drafters choose tokens from logits: as the target samples, or from a law that they tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from workers.draft_law import draft_laws
from workers.errors import TandemError
from workers.grammar_masks import GrammarMasks, GrammarText
from workers.sampling import NO_TOKEN, SamplingRow, law_logits, sample_with_confidence
from workers.streams import Stream, random_bits
from workers.types import ProposeRequest, VerifyRequest

CONFIDENCE_DIGITS = 5
"""Decimals of a confidence; more would only lengthen messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One draft token, and what its drafter says of it."""

    token: int
    confidence: float | None = None
    law: bytes | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class CollectedDrafts:
    """The drafts that a sequence has so far, and whether it is to have more."""

    k: int = 0
    """The number of drafts to make."""
    stop_below: float
    """Drafting ends with the draft at which the product of the confidences falls below this."""
    drafts: list[Draft] = field(default_factory=list)
    has_ended: bool = False
    """Whether no further draft can be had."""

    @property
    def wants_more(self) -> bool:
        is_sure = math.prod(self.confidences) >= self.stop_below
        return is_sure and len(self.drafts) < self.k and not self.has_ended

    def add(self, draft: Draft | None) -> None:
        """Take the next draft; None ends drafting."""
        if draft is None:
            self.has_ended = True
        else:
            self.drafts.append(draft)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(draft.token for draft in self.drafts)

    @property
    def confidences(self) -> tuple[float, ...]:
        return tuple(d.confidence for d in self.drafts if d.confidence is not None)

    @property
    def laws(self) -> tuple[bytes, ...]:
        """The law that each draft was drawn from, under rules that compare laws."""
        return tuple(draft.law for draft in self.drafts if draft.law is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One draft to choose."""

    row: SamplingRow
    round_len: int
    """Committed tokens of the sequence when its drafts were asked for."""
    tells_law: bool
    """Whether the draft is drawn from a law that goes with it; if not, it is chosen as the target
    would."""


def choose_drafts(draws: Sequence[Draw], logits: Tensor) -> list[Draft | None]:
    """A draft for each draw; None where the scores decide none.  # logits [len(draws), vocab]"""
    drafts: dict[int, Draft | None] = {}
    for choose, tells_law in ((_as_the_target, False), (_from_a_law, True)):
        chosen = [index for index, each in enumerate(draws) if each.tells_law == tells_law]
        if chosen:
            of_rows = logits if len(chosen) == len(draws) else logits[chosen]
            of_draws = [draws[index] for index in chosen]
            drafts.update(zip(chosen, choose(of_draws, of_rows), strict=True))
    return [drafts[index] for index in range(len(draws))]


def sampling_row(
    request: ProposeRequest | VerifyRequest, tokens: Sequence[int], allowed: Tensor | None
) -> SamplingRow:
    """What chooses the token behind these, of which `allowed` may be chosen."""
    return SamplingRow(
        params=request.sampling,
        seed=request.seed,
        position=len(tokens),
        history=tokens if request.sampling.needs_history else (),
        prompt_len=request.prompt_len,
        allowed=allowed,
    )


def allowed_next(
    grammars: GrammarMasks, text: GrammarText, request: ProposeRequest | VerifyRequest
) -> Tensor | None:
    """What a request's grammar allows behind a text; anything where that is not known here."""
    try:
        (mask,) = grammars.after_each(
            text, request.sampling.grammar, prompt_len=request.prompt_len, num_drafts=0
        )
    except TandemError:  # tokens that do not match, or no tokenizer here: the target knows it
        return None
    return mask


def _as_the_target(draws: Sequence[Draw], logits: Tensor) -> list[Draft | None]:
    """Drafts chosen with the target's noise."""
    tokens, confidences = sample_with_confidence(logits, [each.row for each in draws])
    return [
        None
        if token == NO_TOKEN or not math.isfinite(confidence)
        else Draft(token=token, confidence=round(confidence, CONFIDENCE_DIGITS))
        for token, confidence in zip(tokens, confidences, strict=True)
    ]


def _from_a_law(draws: Sequence[Draw], logits: Tensor) -> list[Draft | None]:
    """Drafts drawn from laws that go with them, with noise that the target does not use."""
    laws = draft_laws(law_logits(logits, [each.row for each in draws]))
    drafts: list[Draft | None] = []
    for law, each in zip(laws, draws, strict=True):
        bits = random_bits(
            each.row.seed, each.row.position, stream=Stream.DRAFT, round_len=each.round_len
        )
        drafts.append(None if law is None else Draft(token=law.draw(bits), law=law.pack()))
    return drafts
