"""A sequence that ends every worker that runs it ends alone."""

from collections.abc import Sequence
from typing import Any

import pytest

from deployments.router.live import Live
from deployments.router.suspicion import Suspicion
from tests.deployments.loops import (
    CACHE,
    Models,
    Stream,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers
from workers.errors import (
    GenerationFailedError,
    WorkerFailedError,
    WorkerLostError,
    WorkerTimeoutError,
)
from workers.target import Target
from workers.types import Reply, VerifyRequest

POISON = "s3"
"""The sequence that is given the seed 3."""
NUM_SEQUENCES = 6


class PoisonableWorkers(LocalWorkers):
    """Targets that end when they are to run one sequence; another comes up for each."""

    def __init__(self, models: Models, error: type[WorkerLostError], *, after: int) -> None:
        super().__init__(lambda: Target(models.target, CACHE, max_batched_tokens=32), 2)
        self.num_lost = 0
        self._error = error
        self._after = after
        """How many tokens the poison has when it begins to end workers."""

    async def call(
        self, replica_id: str | None, batch: Sequence[VerifyRequest], *, timeout_s: float
    ) -> Reply[Any]:
        lengths = {request.seq_id: request.base_len + len(request.new_tokens) for request in batch}
        if lengths.get(POISON, 0) < self._after:
            return await super().call(replica_id, batch, timeout_s=timeout_s)
        self.num_lost += 1
        self.kill(replica_id if replica_id in self.replicas else next(iter(self.replicas)))
        self.start_replica()
        raise self._error("it ended")


class TestPoison:
    @pytest.mark.parametrize(
        ("error", "after", "most_lost"),
        [
            (WorkerFailedError, 1, 2),
            (WorkerFailedError, 20, 2),
            (WorkerLostError, 1, 4),
            (WorkerLostError, 20, 4),
        ],
    )
    async def test_a_sequence_that_ends_workers_fails_alone(
        self,
        error: type[WorkerLostError],
        after: int,
        most_lost: int,
        models: Models,
        plain: list[list[int]],
    ) -> None:
        seeds = range(NUM_SEQUENCES)
        targets = PoisonableWorkers(models, error, after=after)
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts, targets=targets) as (loop, _, observer):
            streams = await run_all(loop, [make_params(seed) for seed in seeds], concurrency=8)
            poison = streams.pop(3)
            assert isinstance(poison.error, GenerationFailedError)
            assert [stream.token_ids for stream in streams] == plain[:3] + plain[4:NUM_SEQUENCES]
            assert targets.num_lost == most_lost
            await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)
            assert (loop.num_live, observer.num_live) == (0, 0)

    async def test_who_stands_beside_others_losses_is_not_given_up(
        self, models: Models, plain: list[list[int]]
    ) -> None:
        """Every twentieth call ends a worker, whatever it carries, with progress in between."""
        async with running_loop(models, num_targets=2) as (loop, targets, _):

            def lose() -> None:
                if len(targets.calls) % 20 == 0 and len(targets.calls) < 200:
                    targets.kill(next(iter(targets.replicas)))
                    targets.start_replica()

            targets.before_call = lose
            params = [make_params(seed) for seed in range(NUM_SEQUENCES)]
            streams = await run_all(loop, params, concurrency=NUM_SEQUENCES)
            assert [stream.error for stream in streams] == [None] * NUM_SEQUENCES
            assert [stream.token_ids for stream in streams] == plain[:NUM_SEQUENCES]

    async def test_silence_blames_nobody(self) -> None:
        """A call may have waited all its time for a worker to start."""
        live = Live(Stream(make_params(1)).sequence)
        for _ in range(5):
            live.lose_target(WorkerTimeoutError("no answer in 30 s"))
        assert not live.suspicion.is_enough
        assert not live.sequence.is_done

    def test_suspicion_grows_with_losses_and_ends_with_progress(self) -> None:
        silent = Suspicion()
        assert [silent.add(is_by_step=False) for _ in range(4)] == [False, False, False, True]
        said = Suspicion()
        assert [said.add(is_by_step=True) for _ in range(2)] == [False, True]
        said.clear()
        assert not said.is_enough
        assert said.add(is_by_step=True) is False

    def test_a_silent_loss_says_half_as_much_as_a_failed_step_whatever_came_before(self) -> None:
        mixed = Suspicion()
        losses = [False, True, False, False]  # beside others, and twice by itself
        assert [mixed.add(is_by_step=is_by_step) for is_by_step in losses] == [False] * 3 + [True]
        mixed.clear()
        losses = [False, False, False, True]
        assert [mixed.add(is_by_step=is_by_step) for is_by_step in losses] == [False] * 3 + [True]
