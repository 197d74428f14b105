"""A GenerationService over real tiny workers in this process: everything but Serve."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.router.admission import AdmissionLimits
from deployments.router.gamma import FixedGamma
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.overlap import FixedOverlap
from deployments.router.service import GenerationService, ServedModel
from deployments.router.speculation import Policies
from tests.fakes import CharacterTokenizer, LocalWorkers, RecordingObserver
from workers.drafters.model import ModelDrafter
from workers.model import Model
from workers.paged_model import CacheOptions
from workers.target import Target

CACHE = CacheOptions(block_size=4, max_num_seqs=32)


@dataclass(frozen=True)
class LocalServing:
    service: GenerationService
    loop: RoundLoop
    targets: LocalWorkers
    drafts: LocalWorkers


@asynccontextmanager
async def local_serving(
    model: Model, *, max_running: int = 16, max_waiting: int = 64
) -> AsyncIterator[LocalServing]:
    """Serve a model that drafts for itself."""
    targets = LocalWorkers(lambda: Target(model, CACHE, max_batched_tokens=32))
    drafts = LocalWorkers(lambda: ModelDrafter(model, CACHE))
    info = next(iter(targets.replicas.values())).worker.info
    loop = RoundLoop(
        targets=targets,
        drafts=drafts,
        policies=Policies(
            gamma=FixedGamma(4),
            overlap=FixedOverlap(is_on=False),
            max_gamma=8,
            max_drafted_len=info.max_model_len,
        ),
        observer=RecordingObserver(),
        options=LoopOptions(recovery_timeout_s=0.5),
        clock=time.monotonic,
    )
    service = GenerationService(
        ServedModel(name="tiny", tokenizer=CharacterTokenizer(), info=info, created=1),
        loop,
        AdmissionLimits(max_running=max_running, max_waiting=max_waiting),
    )
    try:
        yield LocalServing(service=service, loop=loop, targets=targets, drafts=drafts)
    finally:
        await loop.close()
        await targets.close()
        await drafts.close()
