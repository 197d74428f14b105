"""Steps of the workers that are timed: each can be made again and again, and all take turns."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from cluster import bundled
from tandem.demo.grow import grown_target
from workers.drafters.model import ModelDrafter, load_draft_model
from workers.errors import ConfigError
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import ProposeRequest, SamplingParams, VerifyRequest, WorkerInfo

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a benchmark of the workers alone is asked for."""

    target: str | None
    """None grows the bundled target to 287M parameters."""
    draft: str
    repeats: int
    """Timed steps of each kind, of which the median counts."""
    num_threads: int | None
    """Of the CPU; None leaves torch's default."""
    with_compile: bool
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A sequence that a worker holds, and from which the same step can be made again."""

    seq_id: str
    tokens: tuple[int, ...]
    room: int
    """For drafts after them."""

    @property
    def longest(self) -> int:
        return len(self.tokens) + self.room


def load_models(options: EngineOptions) -> tuple[Model, Model]:
    """Target and draft, for the threads that are asked for."""
    options.output.mkdir(parents=True, exist_ok=True)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    target = load_model(bundled.resolve(options.target or grown_target(options.output)))
    return target, load_draft_model(bundled.resolve(options.draft))


def make_context(seq_id: str, length: int, *, room: int, vocab_size: int) -> Context:
    """Which tokens they are does not matter to a step's time."""
    tokens = tuple(index % vocab_size for index in range(length))
    return Context(seq_id=seq_id, tokens=tokens, room=room)


def make_target(model: Model, contexts: Sequence[Context]) -> Target:
    """A target that holds these contexts."""
    target = Target(model, _cache_options(model, contexts))
    _check_room(target.info, contexts)
    target.verify([_verify_request(context, 0, 0) for context in contexts])
    return target


def make_drafter(model: Model, contexts: Sequence[Context]) -> ModelDrafter:
    """A drafter that does."""
    drafter = ModelDrafter(model, _cache_options(model, contexts))
    _check_room(drafter.info, contexts)
    drafter.propose([_propose_request(context, 0, 0) for context in contexts])
    return drafter


def compile_workers(target: Target, drafter: ModelDrafter) -> None:
    """For as many threads as the app runs each with."""
    target.start_compiling().join()
    with _one_thread():
        drafter.start_compiling().join()


def verification(
    target: Target, contexts: Sequence[Context], num_tokens: int
) -> Callable[[], object]:
    """Verifies the newest token of each and `num_tokens` - 1 drafts, the same ones each time."""
    batch = [_verify_request(c, len(c.tokens) - 1, num_tokens - 1) for c in contexts]
    return lambda: target.verify(batch)


def drafting(
    drafter: ModelDrafter, contexts: Sequence[Context], num_drafts: int
) -> Callable[[], object]:
    """Makes that many drafts for each, anew each time."""
    batch = [_propose_request(c, len(c.tokens) - 1, num_drafts) for c in contexts]

    @_one_thread()
    def run() -> None:
        drafter.propose(batch)

    return run


def median_times(
    actions: Sequence[Callable[[], object]], repeats: int, *, name: str
) -> list[float]:
    """Median seconds of each, all taking turns; the first round does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for repeat in tqdm(range(repeats + 1), desc=name):
        for action, of_action in zip(actions, times, strict=True):
            started = time.perf_counter()
            action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat > 0:
                of_action.append(time.perf_counter() - started)
    return [median(of_action) for of_action in times]


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the app runs its drafter."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _cache_options(model: Model, contexts: Sequence[Context]) -> CacheOptions:
    """All at once, each in blocks of its own, as sequences of different texts are.

    Raises ConfigError where the model's positions do not allow the longest.
    """
    longest = max(context.longest for context in contexts)
    if longest > model.max_position:
        raise ConfigError(
            f"{model.name!r} has positions for {model.max_position} tokens, and this benchmark "
            f"runs sequences of {longest}; give a model with a longer context"
        )
    return CacheOptions(
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_seqs=-(-_num_tokens_held(contexts) // longest),
        prefix_caching=False,
    )


def _num_tokens_held(contexts: Sequence[Context]) -> int:
    """At most: each may leave a block nearly empty."""
    return sum(context.longest + BLOCK_SIZE for context in contexts)


def _check_room(info: WorkerInfo, contexts: Sequence[Context]) -> None:
    """Otherwise sequences would be preempted, and their steps be none."""
    num_held, num_needed = info.num_blocks * info.block_size, _num_tokens_held(contexts)
    if num_held < num_needed:
        raise ConfigError(
            f"the memory that is free holds the cache of {num_held} tokens of {info.model!r}, and "
            f"this benchmark needs {num_needed}; free some memory or give a smaller model"
        )


def _verify_request(context: Context, base_len: int, num_drafts: int) -> VerifyRequest:
    return VerifyRequest(
        seq_id=context.seq_id,
        base_len=base_len,
        new_tokens=context.tokens[base_len:],
        draft_tokens=(0,) * num_drafts,
        prompt_len=len(context.tokens),
        sampling=GREEDY,
    )


def _propose_request(context: Context, base_len: int, num_drafts: int) -> ProposeRequest:
    return ProposeRequest(
        seq_id=context.seq_id,
        base_len=base_len,
        new_tokens=context.tokens[base_len:],
        k=num_drafts,
        prompt_len=len(context.tokens),
        sampling=GREEDY,
    )
