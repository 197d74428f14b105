"""Decoding with a target and a drafter that have nothing between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.drafters.model import ModelDrafter
from workers.errors import GenerationFailedError
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import ProposeRequest, VerifyRequest, WorkResult

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8)


@dataclass(slots=True, kw_only=True)
class _Text:
    """One text in the making."""

    seq_id: str
    seed: int
    prompt_len: int
    tokens: list[int]
    cached_len: int = 0
    """Tokens that the target has cached."""
    drafted_len: int = 0
    """Tokens that the drafter has cached and that were committed."""


class Decoder:
    """What a router does, for a batch that begins and ends together."""

    def __init__(self, target: Target, drafter: ModelDrafter | None = None) -> None:
        self._target = target
        self._drafter = drafter
        self._num_texts = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        gamma: int = 0,
        sampling: SamplingParams = GREEDY,
    ) -> list[list[int]]:
        """The first tokens that follow each prompt, decoded as one batch, each by its own seed."""
        texts = [
            _Text(
                seq_id=str(self._num_texts + index),
                seed=index,
                prompt_len=len(prompt),
                tokens=list(prompt),
            )
            for index, prompt in enumerate(prompts)
        ]
        self._num_texts += len(texts)
        running = texts
        while running := [t for t in running if len(t.tokens) < t.prompt_len + num_tokens]:
            drafts = self._draft(running, gamma, sampling)
            self._verify(running, drafts, sampling)
        seq_ids = [text.seq_id for text in texts]
        self._target.release(seq_ids)
        if self._drafter is not None:
            self._drafter.release(seq_ids)
        return [text.tokens[text.prompt_len :][:num_tokens] for text in texts]

    def _draft(
        self, texts: Sequence[_Text], gamma: int, sampling: SamplingParams
    ) -> list[tuple[int, ...]]:
        if self._drafter is None or gamma == 0:
            return [()] * len(texts)
        results = self._drafter.propose(
            [
                ProposeRequest(
                    seq_id=text.seq_id,
                    base_len=text.drafted_len,
                    new_tokens=tuple(text.tokens[text.drafted_len :]),
                    k=gamma,
                    prompt_len=text.prompt_len,
                    sampling=sampling,
                    seed=text.seed,
                )
                for text in texts
            ]
        )
        for text, result in zip(texts, results, strict=True):
            _check(result)
            text.drafted_len = len(text.tokens)
        return [result.draft_tokens for result in results]

    def _verify(
        self, texts: Sequence[_Text], drafts: Sequence[tuple[int, ...]], sampling: SamplingParams
    ) -> None:
        results = self._target.verify(
            [
                VerifyRequest(
                    seq_id=text.seq_id,
                    base_len=text.cached_len,
                    new_tokens=tuple(text.tokens[text.cached_len :]),
                    draft_tokens=draft_tokens,
                    prompt_len=text.prompt_len,
                    sampling=sampling,
                    seed=text.seed,
                )
                for text, draft_tokens in zip(texts, drafts, strict=True)
            ]
        )
        for text, result in zip(texts, results, strict=True):
            _check(result)
            text.cached_len = len(text.tokens) + result.num_accepted
            text.tokens += result.tokens
            self.num_accepted += result.num_accepted
        self.num_drafted += sum(map(len, drafts))


def _check(result: WorkResult) -> None:
    """Raise GenerationFailedError for a text that cannot go on."""
    if result.error or result.needs_tokens_from is not None:
        raise GenerationFailedError(
            f"text {result.seq_id}: {result.error or 'its place in the cache went to another'}"
        )
