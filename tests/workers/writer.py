"""A router for one sequence whose target drafts by itself; `decoding` is for all others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.target import Target
from workers.types import NO_DRAFTS, DraftTokens, VerifyRequest, VerifyResult


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
