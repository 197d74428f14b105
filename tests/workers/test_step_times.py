"""A worker's own table of step times."""

from collections.abc import Callable

import pytest

from tests.workers.decoding import CACHE, generate, make_prompt
from workers.cuda import graphed_step
from workers.drafters.model import ModelDrafter
from workers.model import Model
from workers.step_times import DRAFT_SIZES, NUM_REPEATS, VERIFY_SIZES, Size, StepTable, StepTiming
from workers.target import Target
from workers.types import ProposeRequest

SIZES = ((1, 1), (1, 8), (8, 64))


def measure(
    sizes: tuple[Size, ...], time_step: Callable[[Size], float], **how: float
) -> StepTiming:
    timing = StepTiming(sizes, time_step, **how)
    while not timing.is_done:
        timing.time_one()
    return timing


def test_every_size_is_timed_a_few_times_and_the_fastest_counts() -> None:
    asked: list[Size] = []

    def time_step(size: Size) -> float:
        asked.append(size)
        is_first = asked.count(size) == 1
        return size[1] * 0.001 + (0.1 if is_first else 0.0)

    times = measure(SIZES, time_step, budget_s=10.0).times
    assert [(t.num_sequences, t.num_tokens) for t in times] == list(SIZES)
    assert [t.seconds for t in times] == pytest.approx([0.001, 0.008, 0.064])
    assert asked.count((8, 64)) == NUM_REPEATS


def test_no_step_takes_longer_than_a_larger_one() -> None:
    """So that a pause of the machine spoils one size at most for the sizes below it."""
    seconds = {(1, 1): 0.3, (1, 8): 0.004, (8, 8): 0.005, (8, 64): 0.02}
    times = measure(tuple(seconds), seconds.__getitem__, budget_s=10.0).times
    assert [t.seconds for t in times] == [0.004, 0.004, 0.005, 0.02]


def test_a_large_model_has_a_shorter_table() -> None:
    """No step is begun that could take longer than what is left."""
    spent: list[float] = []

    def time_step(size: Size) -> float:
        spent.append(0.1 * size[1])
        return spent[-1]

    times = measure(VERIFY_SIZES, time_step, budget_s=2.0).times
    assert times
    assert sum(spent) <= 2.0
    assert all(t.num_tokens < 20 for t in times)


def test_the_first_size_is_timed_however_long_it_takes() -> None:
    (time,) = measure(SIZES, lambda _: 60.0, budget_s=1.0).times
    assert time.seconds == 60.0


def test_sizes_of_graphs_are_in_the_table() -> None:
    """Up to 128 tokens: on a CPU, a longer step would hold up the others for too long."""
    assert {size for _, size in VERIFY_SIZES} >= {n for n in graphed_step.SIZES if n <= 128}
    assert {(n, n) for n in (1, 2, 4, 8, 16, 32)} == set(DRAFT_SIZES)


def test_a_table_is_outdated_once_another_forward_has_taken_over() -> None:
    forward = "own"
    table = StepTable(SIZES, lambda size: size[1] / 1000, forward=lambda: forward)
    assert not table.is_outdated  # nobody has asked for one
    table.measure()
    first = table.times
    assert (table.version, len(first), table.is_outdated) == (0, 3, False)
    forward = "compiled"
    assert table.is_outdated
    table.time_one_step()
    assert (table.version, table.times) == (0, first)  # until the new one is complete
    while table.is_outdated:
        table.time_one_step()
    assert (table.version, len(table.times)) == (1, 3)


def test_a_table_in_the_making_begins_anew_with_another_forward() -> None:
    forward = "own"
    timed: list[str] = []

    def time_step(_: Size) -> float:
        timed.append(forward)
        return 0.001

    table = StepTable(SIZES, time_step, forward=lambda: forward)
    table.measure()
    forward = "recorded"
    table.time_one_step()
    forward = "compiled"
    while table.is_outdated:
        table.time_one_step()
    assert timed.count("compiled") == 1 + NUM_REPEATS * len(SIZES)


def test_timed_steps_leave_nothing_behind(tiny_model: Callable[..., Model]) -> None:
    """Neither with sequences in the cache nor without; and texts go on as they would have."""
    model, prompt = tiny_model("llama"), make_prompt(1, 30)
    plain = generate(Target(model, CACHE), prompt, 30)
    target = Target(model, CACHE)
    target.step_table.measure()
    assert (target.num_tokens_run, target.num_used_blocks, target.num_sequences) == (0, 0, 0)
    assert (target.num_prompt_tokens, target.num_preemptions) == (0, 0)

    def time_meanwhile(*_: object) -> tuple[int, ...]:
        target.step_table.time_one_step()
        return ()

    assert generate(target, prompt, 30, drafts=time_meanwhile) == plain
    target.check_integrity()
    sizes = {(t.num_sequences, t.num_tokens) for t in target.info.step_times}
    assert sizes == set(VERIFY_SIZES)
    assert all(t.seconds > 0.0 for t in target.info.step_times)


def test_a_drafter_times_single_draft_steps(tiny_model: Callable[..., Model]) -> None:
    drafter = ModelDrafter(tiny_model("llama"), CACHE)
    assert drafter.info.step_times == ()
    drafter.step_table.measure()
    assert {(t.num_sequences, t.num_tokens) for t in drafter.info.step_times} == set(DRAFT_SIZES)
    request = ProposeRequest(seq_id="s", base_len=0, new_tokens=(5, 6), k=2, prompt_len=2)
    assert len(drafter.propose([request])[0].draft_tokens) == 2


def test_a_short_context_has_no_longer_steps(tiny_model: Callable[..., Model]) -> None:
    cache = CACHE.__class__(block_size=4, max_num_seqs=8, max_model_len=4)
    target = Target(tiny_model("llama"), cache)
    target.step_table.measure()
    assert max(t.num_tokens / t.num_sequences for t in target.info.step_times) <= 4
