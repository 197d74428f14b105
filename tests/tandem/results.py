"""Results of a load, made up for the benchmarks' tests."""

from collections.abc import Sequence

from tandem.bench.rows import Sample, Setting
from tandem.live.client import Answer, Event, LoadResult, Usage
from tandem.live.counters import Counters


def make_result(tokens_per_s: float, *answers: Sequence[Usage]) -> LoadResult:
    """Answers whose events come every 0.1 s, the first after as long."""
    return LoadResult(
        answers=tuple(
            Answer(
                started_s=0.0,
                ended_s=0.1 * len(usages),
                events=tuple(
                    Event(at_s=0.1 * at, text="x", usage=usage)
                    for at, usage in enumerate(usages, start=1)
                ),
                usage=usages[-1],
            )
            for usages in answers
        ),
        tokens_per_s=tokens_per_s,
    )


def usages(*counts: tuple[int, int, int]) -> list[Usage]:
    return [Usage(num_tokens=t, num_accepted=a, num_drafted=d) for t, a, d in counts]


def make_sample(tokens_per_s: float, **counts: float) -> Sample:
    result = make_result(tokens_per_s, usages((1, 0, 0), (int(tokens_per_s), 0, 0)))
    values = {name.replace("__", ":"): value for name, value in counts.items()}
    return Sample(load=result, counters=Counters(values))


def make_setting(gamma: int | str, concurrency: int = 1) -> Setting:
    return Setting(text="easy", temperature=0.0, concurrency=concurrency, gamma=gamma)
