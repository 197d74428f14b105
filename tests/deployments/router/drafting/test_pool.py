"""The drafter of a pool: what it has its workers read, and what it has them forget."""

from deployments.router.drafting import remote
from deployments.router.drafting.protocol import DraftRequest, Offer, Proposed
from deployments.router.drafting.remote import PooledDrafter
from tests.deployments.loops import (
    CACHE,
    Models,
    Stream,
    make_params,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers, ScriptedDrafter
from workers.drafters.model import ModelDrafter
from workers.paged_model import CacheOptions


class TestPool:
    async def test_a_sequence_that_ends_while_its_drafter_reads_it_is_freed_there(
        self, models: Models
    ) -> None:
        drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE))
        pool = PooledDrafter(drafts, timeout_s=5.0, max_model_len=256)
        drafts.delay_s = 0.02
        sequence = Stream(make_params(4)).sequence
        pool.catch_up(sequence)
        pool.catch_up(sequence)
        assert pool.offer(sequence, 4) == Offer(max_tokens=4, is_ready=False)
        await wait_until(lambda: bool(drafts.calls))
        sequence.is_cancelled = True
        pool.forget(sequence)
        assert not pool.is_idle
        await wait_until(lambda: pool.is_idle)
        assert len(drafts.calls) == 1
        await wait_until(lambda: drafts.num_sequences + drafts.num_used_blocks == 0)
        # what is begun after the end, as by a prefetch, leaves nothing behind either
        pool.catch_up(sequence)
        assert await pool.propose([DraftRequest(sequence=sequence, k=2)]) == Proposed()
        assert pool.is_idle
        await drafts.close()

    async def test_a_sequence_that_ends_before_its_drafter_reads_it_is_not_read(self) -> None:
        asked = []
        pool = PooledDrafter(ScriptedDrafter(asked.append), timeout_s=5.0, max_model_len=256)
        sequence = Stream(make_params(4)).sequence
        pool.catch_up(sequence)
        sequence.is_cancelled = True
        pool.forget(sequence)
        await wait_until(lambda: pool.is_idle)
        assert not asked

    async def test_a_sequence_far_ahead_of_its_drafter_is_read_in_the_background(
        self, models: Models
    ) -> None:
        """As when another drafter has spoken for it for long."""
        cache = CacheOptions(block_size=4, max_num_seqs=32)
        drafts = LocalWorkers(lambda: ModelDrafter(models.draft, cache))
        pool = PooledDrafter(drafts, timeout_s=5.0, max_model_len=4096)
        sequence = Stream(make_params(4)).sequence
        for num_more, is_ready in ((0, False), (remote.MAX_BEHIND, True), (1, False)):
            sequence.tokens += [5] * num_more
            offer = pool.offer(sequence, 4)
            assert offer is not None
            assert offer.is_ready is is_ready
            if num_more == 0:
                pool.catch_up(sequence)
                await wait_until(lambda: not pool._tasks)
        await drafts.close()

    async def test_what_drafts_take_is_seen_where_nothing_was_written_without_them(
        self, models: Models
    ) -> None:
        """Else the drafter reads that in the same step, which is no part of what drafts take."""
        drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE))
        pool = PooledDrafter(drafts, timeout_s=5.0, max_model_len=256)
        sequence = Stream(make_params(4)).sequence
        pool.catch_up(sequence)
        await wait_until(lambda: not pool._tasks)
        seen = []
        for num_written in (0, 1, 3, 6, 20, 1):
            sequence.tokens += [5] * num_written
            proposed = await pool.propose([DraftRequest(sequence=sequence, k=2)])
            seen.append(proposed.is_typical)
        assert seen == [True, True, True, False, False, True]
        await drafts.close()

    async def test_the_time_of_further_drafts_than_the_first_is_told_apart(
        self, models: Models
    ) -> None:
        """Each token that the drafter runs takes a second."""

        def make() -> ModelDrafter:
            drafter = ModelDrafter(models.draft, CACHE)
            drafter._clock = lambda: float(drafter.num_tokens_run)
            return drafter

        async with running_loop(models, gamma=3, drafts=LocalWorkers(make)) as (loop, _, observer):
            await run_all(loop, [make_params(4)], concurrency=1)
        drafted = [record for record in observer.records if record.outcomes]
        assert drafted
        for record in drafted:
            assert record.draft_further_s == record.longest_draft - 1
