"""A round loop over real workers in this process, and drafters of several kinds."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from deployments.router.drafting.chain import make_drafters
from deployments.router.drafting.overlap import FixedOverlap
from deployments.router.drafting.protocol import Drafter
from deployments.router.drafting.remote import DraftClient, PooledDrafter
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.policy.controller import make_controller
from deployments.router.policy.gamma import GammaController
from deployments.router.sequence import Delta, GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.speculation import Policies
from tests.fakes import CharacterTokenizer, LocalWorkers, RecordingObserver, ScriptedDrafter
from tests.tiny_configs import VOCAB_SIZE
from workers.drafters.model import ModelDrafter
from workers.errors import TandemError
from workers.grammar_compiler import GrammarCompiler
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target

CACHE = CacheOptions(block_size=4, max_num_seqs=32)
SAMPLED = SamplingParams(temperature=0.8)
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 28
EARLY_EXIT_LAYER = 1
FAST = LoopOptions(verify_timeout_s=30.0, recovery_timeout_s=30.0)


@dataclass(frozen=True)
class Models:
    target: Model
    draft: Model
    """The target, slightly off: a draft that is often right."""

    @classmethod
    def load(cls, name: str, *, noise: float = 0.02) -> "Models":
        """The model of a folder in fp32, and beside it the same with noise on its weights."""
        target = load_model(name, dtype="float32", device="cpu")
        return cls(target=target, draft=load_noisy(name, noise=noise))


def load_noisy(name: str, *, noise: float = 0.02) -> Model:
    """The model of a folder in fp32, with noise of this standard deviation on its weights."""
    model = load_model(name, dtype="float32", device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter += torch.randn_like(parameter) * noise
    return model


def make_params(
    seed: int, *, sampling: SamplingParams = SAMPLED, max_tokens: int = NUM_TOKENS, **more: object
) -> GenerationParams:
    rng = random.Random(seed)
    prompt = tuple(rng.choices(range(3, VOCAB_SIZE), k=rng.choice([1, 3, 8, 17, 60])))
    return GenerationParams(
        prompt=prompt, max_tokens=max_tokens, sampling=sampling, seed=seed, **more
    )


class Stream:
    """A sequence and what it has emitted."""

    def __init__(self, params: GenerationParams, eos_token_ids: Sequence[int] = ()) -> None:
        self.deltas: list[Delta] = []
        self.error: TandemError | None = None
        self.first_delta = asyncio.Event()
        self.sequence = LiveSequence(
            f"s{params.seed}",
            params,
            decoder=CharacterTokenizer(),
            eos_token_ids=eos_token_ids,
            emit=self._take,
        )

    def _take(self, delta: Delta | TandemError) -> None:
        if isinstance(delta, TandemError):
            self.error = delta
        else:
            self.deltas.append(delta)
        self.first_delta.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@asynccontextmanager
async def running_loop(
    models: Models,
    *,
    gamma: int | Literal["dynamic"] | GammaController = 4,
    overlap: bool = False,
    drafts: LocalWorkers | ScriptedDrafter | None = None,
    drafter: str = "model",
    drafters: Sequence[Drafter] | None = None,
    draft_timeout_s: float = 5.0,
    num_targets: int = 1,
    targets: LocalWorkers | None = None,
    options: LoopOptions = FAST,
    cache: CacheOptions = CACHE,
    max_gamma: int = 8,
) -> AsyncIterator[tuple[RoundLoop, LocalWorkers, RecordingObserver]]:
    """`drafters` come in place of those that `drafter` names."""
    targets = targets or local_targets(models.target, drafter, cache, num_replicas=num_targets)
    max_model_len = targets.info.max_model_len
    if drafters is None:
        drafters = drafters_of(
            drafter, drafts, timeout_s=draft_timeout_s, max_model_len=max_model_len
        )
    observer = RecordingObserver()
    loop = RoundLoop(
        targets=targets,
        drafters=drafters,
        policies=Policies(
            gamma=make_controller(gamma) if isinstance(gamma, int | str) else gamma,
            overlap=FixedOverlap(is_on=overlap),
            max_gamma=max_gamma,
            max_model_len=max_model_len,
        ),
        observer=observer,
        options=options,
        clock=time.monotonic,
    )
    try:
        yield loop, targets, observer
    finally:
        await loop.close()
        await targets.close()
        if isinstance(drafts, LocalWorkers):
            await drafts.close()


def local_targets(
    model: Model, drafter: str, cache: CacheOptions = CACHE, *, num_replicas: int = 1
) -> LocalWorkers:
    """Targets in this process, with an early exit if the option `drafter` names it."""
    early_exit_layer = EARLY_EXIT_LAYER if "early_exit" in drafter else None

    def make_target() -> Target:
        return Target(model, cache, max_batched_tokens=32, early_exit_layer=early_exit_layer)

    return LocalWorkers(make_target, num_replicas)


def drafters_of(
    drafter: str,
    drafts: DraftClient | None,
    grammars: GrammarCompiler | None = None,
    *,
    timeout_s: float = 5.0,
    max_model_len: int = 256,
) -> list[Drafter]:
    """The drafters that the option `drafter` names; "model" only if there are `drafts`."""
    missing = {"none"} if drafts is not None else {"none", "model"}
    names = [name for name in drafter.split(",") if name not in missing]
    pool = None
    if drafts is not None:
        pool = PooledDrafter(drafts, timeout_s=timeout_s, max_model_len=max_model_len)
    return make_drafters(names, pool, grammars)


async def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def run_all(
    loop: RoundLoop,
    all_params: Sequence[GenerationParams],
    *,
    concurrency: int,
    eos_token_ids: Sequence[int] = (),
) -> list[Stream]:
    slots = asyncio.Semaphore(concurrency)
    streams = [Stream(params, eos_token_ids) for params in all_params]

    async def run(stream: Stream) -> None:
        async with slots:
            loop.add(stream.sequence)
            await stream.sequence.done.wait()

    async with asyncio.timeout(120):
        await asyncio.gather(*[run(stream) for stream in streams])
    return streams


def model_drafts(models: Models) -> LocalWorkers:
    return LocalWorkers(lambda: ModelDrafter(models.draft, CACHE, max_batched_tokens=32))


def random_drafts() -> ScriptedDrafter:
    rng = random.Random(0)
    return ScriptedDrafter(lambda request: rng.choices(range(VOCAB_SIZE), k=request.k))


def dying_drafts(models: Models) -> LocalWorkers:
    """Drafts whose only replica dies after a while; another comes up later."""
    drafts = model_drafts(models)

    def live_or_die() -> None:
        if len(drafts.calls) in (30, 90) and drafts.replicas:
            drafts.kill(next(iter(drafts.replicas)))
        if len(drafts.calls) == 50:
            drafts.start_replica()

    drafts.before_call = live_or_die
    return drafts


DRAFTERS: dict[str, Callable[[Models], LocalWorkers | ScriptedDrafter]] = {
    "model": model_drafts,
    "random": lambda _: random_drafts(),
    "dying": dying_drafts,
}
