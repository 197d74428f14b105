"""Decoding with workers alone: what a router does, for one sequence and without one."""

import random
from collections.abc import Callable, Sequence

from tests.tiny_configs import VOCAB_SIZE
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import VerifyRequest

CACHE = CacheOptions(block_size=4, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
PENALISED = SamplingParams(
    temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
)


Drafts = Callable[[str, Sequence[int]], Sequence[int]]


def make_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def generate(
    target: Target,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
    drafts: Drafts = lambda *_: (),
    seq_id: str = "s",
    seed: int = 1,
    forget_every: int | None = None,
    next_k: int = 0,
) -> list[int]:
    """The tokens of a text; with `next_k`, the target's own drafts follow those of `drafts`."""
    tokens, cached_len, num_rounds = list(prompt), 0, 0
    own: tuple[int, ...] = ()
    while len(tokens) < len(prompt) + num_tokens:
        num_rounds += 1
        if forget_every and num_rounds % forget_every == 0:
            target.release([seq_id])
        request = VerifyRequest(
            seq_id=seq_id,
            base_len=cached_len,
            new_tokens=tuple(tokens[cached_len:]),
            draft_tokens=(*drafts(seq_id, tokens), *own) if cached_len else (),
            next_k=next_k,
            prompt_len=len(prompt),
            sampling=sampling,
            seed=seed,
        )
        (result,) = target.verify([request])
        target.check_integrity()
        if result.needs_tokens_from is not None:
            cached_len = result.needs_tokens_from
            continue
        cached_len = len(tokens) + result.num_accepted
        tokens += result.tokens
        own = result.next_drafts.tokens
    target.release([seq_id])
    return tokens[len(prompt) : len(prompt) + num_tokens]


def random_drafts(length: int, seed: int = 0) -> Drafts:
    rng = random.Random(seed)
    return lambda *_: rng.choices(range(VOCAB_SIZE), k=length)


def knowing_drafts(truth: Sequence[int], prompt_len: int, length: int, wrong_every: int) -> Drafts:
    """Drafts that are right, but for every so many."""

    def propose(_: str, tokens: Sequence[int]) -> list[int]:
        start = len(tokens) - prompt_len
        guesses = list(truth[start : start + length])
        return [
            (g + 1) % VOCAB_SIZE if (start + i) % wrong_every == 0 else g
            for i, g in enumerate(guesses)
        ]

    return propose
