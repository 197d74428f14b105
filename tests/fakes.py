"""Stand-ins for what a test does not want to start."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deployments.replicas.step_loop import StepLoop
from deployments.router.round import RoundRecord
from workers.errors import WorkerLostError, WorkerTimeoutError
from workers.step_worker import StepWorker
from workers.types import ProposeRequest, ProposeResult, Reply, WorkerInfo

END = "<|end|>"
"""The special token of a byte_tokenizer."""
CHARACTERS = "".join(chr(code) for code in range(33, 127)) + " \n\t"


class CharacterTokenizer:
    """One printable character per token: 97 of them, as many as the tiny models know."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return [CHARACTERS.index(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return "".join(CHARACTERS[token % len(CHARACTERS)] for token in token_ids)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [CHARACTERS[token] for token in ids]

    def get_vocab(self) -> dict[str, int]:
        return {character: token for token, character in enumerate(CHARACTERS)}


def byte_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with hardly a merge: characters fall into several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


async def answer_of(loop: StepLoop[Any, Any], batch: Sequence[Any]) -> Reply[Any]:
    """The reply to a call, which frees its sequences if it is cancelled, as over a stream."""
    reply: asyncio.Future[Reply[Any]] = asyncio.get_running_loop().create_future()

    def answer(outcome: Reply[Any] | Exception) -> None:
        if reply.done():
            return
        if isinstance(outcome, Exception):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)

    loop.submit(batch, answer)
    try:
        return await reply
    except asyncio.CancelledError:
        loop.release([request.seq_id for request in batch])
        raise


class LocalWorkers:
    """A WorkerClient whose replicas are real workers in this process, and mortal."""

    def __init__(
        self, make_worker: Callable[[], StepWorker[Any, Any]], num_replicas: int = 1
    ) -> None:
        self._make_worker = make_worker
        self._num_started = 0
        self.replicas: dict[str, StepLoop[Any, Any]] = {}
        self._killed: list[StepLoop[Any, Any]] = []
        self.calls: list[Sequence[Any]] = []
        self.delay_s = 0.0
        self.before_call: Callable[[], None] = lambda: None
        for _ in range(num_replicas):
            self.start_replica()

    def start_replica(self) -> str:
        replica_id = f"replica-{self._num_started}"
        self._num_started += 1
        self.replicas[replica_id] = StepLoop(
            self._make_worker, idle_timeout_s=300, clock=time.monotonic, replica_id=replica_id
        )
        return replica_id

    async def close(self) -> None:
        for replica in [*self.replicas.values(), *self._killed]:
            await replica.close()

    def kill(self, replica_id: str) -> None:
        """Take away a replica and its cache; calls to it go to another."""
        self._killed.append(self.replicas.pop(replica_id))

    @property
    def info(self) -> WorkerInfo:
        """What the first replica says of itself."""
        return next(iter(self.replicas.values())).worker.info

    @property
    def num_sequences(self) -> int:
        return sum(replica.worker.num_sequences for replica in self.replicas.values())

    @property
    def num_steps(self) -> int:
        return sum(replica.work.num_steps for replica in self.replicas.values())

    @property
    def num_used_blocks(self) -> int:
        return sum(replica.worker.num_used_blocks for replica in self.replicas.values())

    async def call(
        self, replica_id: str | None, batch: Sequence[Any], *, timeout_s: float
    ) -> Reply[Any]:
        self.calls.append(batch)
        self.before_call()
        if not self.replicas:
            raise WorkerTimeoutError("no replica is left")
        if replica_id not in self.replicas:
            replica_id = list(self.replicas)[len(self.calls) % len(self.replicas)]
        replica = self.replicas[replica_id]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.delay_s)
                reply = await answer_of(replica, batch)
        except TimeoutError:
            raise WorkerLostError(f"no answer in {timeout_s} s") from None
        if replica_id not in self.replicas:
            raise WorkerLostError(f"{replica_id} died")
        return reply

    def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        if replica_id in self.replicas:
            self.replicas[replica_id].release(seq_ids)

    async def find(self) -> str:
        if not self.replicas:
            raise WorkerTimeoutError("no replica is left")
        return next(iter(self.replicas))


class ScriptedDrafter:
    """A WorkerClient of drafters that says what it is told, at once."""

    def __init__(self, draft: Callable[[ProposeRequest], Sequence[int]]) -> None:
        self._draft = draft
        self.released: list[str] = []

    async def call(
        self,
        replica_id: str | None,
        batch: Sequence[ProposeRequest],
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Reply[ProposeResult]:
        results = tuple(
            ProposeResult(seq_id=request.seq_id, draft_tokens=tuple(self._draft(request)))
            for request in batch
        )
        return Reply(
            replica_id=replica_id or "scripted",
            compute_s=0.0,
            num_steps=1,
            num_tokens=1,
            num_prefill_tokens=0,
            results=results,
        )

    def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:  # noqa: ARG002
        self.released += seq_ids

    async def find(self) -> str:
        return "scripted"


class RecordingObserver:
    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.num_live = 0
        self.error: Exception | None = None
        """What goes wrong with every record."""

    def observe_round(self, record: RoundRecord) -> None:
        self.records.append(record)
        if self.error is not None:
            raise self.error

    def observe_live(self, num_live: int) -> None:
        self.num_live = num_live
