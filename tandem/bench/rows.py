"""From the samples of a setting to a row of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from tandem.bench import theory
from tandem.bench.client import LoadResult
from tandem.bench.report import milliseconds, number, percentiles
from tandem.bench.theory import RelativeCosts

DYNAMIC: Literal["dynamic"] = "dynamic"
AS_SERVED: Literal["as served"] = "as served"
Gamma = int | Literal["dynamic", "as served"]
"""A server that is not ours drafts as it is served."""
MOST_THEORY = 16
"""The longest draft that theory may recommend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    text: str
    temperature: float
    concurrency: int
    gamma: Gamma

    @property
    def plain(self) -> "Setting":
        """The same without drafts."""
        return Setting(
            text=self.text, temperature=self.temperature, concurrency=self.concurrency, gamma=0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    load: LoadResult
    statistics: Any
    """The router's RoundStatistics; None of a server that is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What the router recorded; medians, times in seconds."""

    alpha: float
    """Accepted of tested draft tokens."""
    tau: float
    """Tokens per verified sequence and round."""
    mean_gamma: float
    """Draft tokens per sequence and round with drafts."""
    theory_speedup: float | None
    """For this alpha, mean gamma and the costs measured; None without a gamma 0 to compare to, or
    where most rounds had no drafts."""
    theory_gamma: int | None
    """What theory would choose."""
    draft_s: float
    verify_s: float
    verify_compute_s: float
    """Of verify_s, what the target spent in steps."""
    router_s: float
    """The router's own time per round."""
    outside_s: float
    """A round's time in neither a draft nor a target step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repeats of one setting; times in seconds."""

    setting: Setting
    tokens_per_s: float
    tokens_per_s_of_repeats: tuple[float, ...]
    """In their order."""
    speedup: float | None
    """Over gamma 0 in the same repeat, where that is measured."""
    later_speedup: float | None
    """Of medians, of a stream's tokens after the first: theory leaves prompts out too."""
    time_to_first_s: tuple[float, ...]
    """p50, p95"""
    chunk_gap_s: tuple[float, ...]
    """p50, p95, p99 of the time between two chunks of a stream, each with a round's tokens."""
    rounds: Rounds | None
    """None of a server that is not ours."""


def make_settings(
    *,
    texts: Sequence[str],
    temperatures: Sequence[float],
    concurrencies: Sequence[int],
    gammas: Sequence[Gamma],
) -> list[Setting]:
    """All of them with each other; gammas, which are compared, one after the other."""
    return [
        Setting(text=text, temperature=temperature, concurrency=concurrency, gamma=gamma)
        for text in texts
        for temperature in temperatures
        for concurrency in concurrencies
        for gamma in gammas
    ]


def make_rows(samples: Mapping[Setting, Sequence[Sample]]) -> list[Row]:
    return [
        _row(setting, of_setting, samples.get(setting.plain, ()))
        for setting, of_setting in samples.items()
    ]


def _row(setting: Setting, samples: Sequence[Sample], plain: Sequence[Sample]) -> Row:
    """`plain`: of the same setting without drafts, where that is measured."""
    speeds, plain_speeds = _speeds(samples), _speeds(plain)
    first_s = [s for sample in samples for s in sample.load.time_to_first_s]
    gaps_s = [s for sample in samples for s in sample.load.chunk_gaps_s]
    is_ours = all(sample.statistics is not None for sample in samples)
    return Row(
        setting=setting,
        tokens_per_s=median(speeds),
        tokens_per_s_of_repeats=speeds,
        speedup=median(paired_ratios(speeds, plain_speeds)) if plain else None,
        later_speedup=_later_token_s(plain) / _later_token_s(samples) if plain else None,
        time_to_first_s=percentiles(first_s, (50, 95)),
        chunk_gap_s=percentiles(gaps_s, (50, 95, 99)),
        rounds=_rounds(samples, plain) if is_ours else None,
    )


def _rounds(samples: Sequence[Sample], plain: Sequence[Sample]) -> Rounds:
    statistics = [sample.statistics for sample in samples]
    num_tested = sum(s.num_tested for s in statistics)
    num_accepted = sum(s.num_accepted for s in statistics)
    num_drafts = sum(s.num_drafts for s in statistics)
    alpha = num_accepted / num_tested if num_tested else 0.0
    mean_gamma = sum(s.num_draft_tokens for s in statistics) / num_drafts if num_drafts else 0.0
    # a median of 0 is of rounds that mostly had no drafts, and says nothing of what drafting costs
    has_costs = plain and num_drafts and _typical(samples, "draft_compute_s") > 0
    costs = _costs(samples, plain, mean_gamma) if has_costs else None
    return Rounds(
        alpha=alpha,
        tau=1 + num_accepted / num_drafts if num_drafts else 1.0,
        mean_gamma=mean_gamma,
        theory_speedup=theory.speedup(alpha, mean_gamma, costs) if costs else None,
        theory_gamma=theory.best_gamma(alpha, costs, most=MOST_THEORY) if costs else None,
        draft_s=_typical(samples, "draft_s"),
        verify_s=_typical(samples, "verify_s"),
        verify_compute_s=_typical(samples, "verify_compute_s"),
        router_s=_typical(samples, "router_s"),
        outside_s=_typical(samples, "outside_s"),
    )


def _costs(samples: Sequence[Sample], plain: Sequence[Sample], gamma: float) -> RelativeCosts:
    """As measured in the same run."""
    plain_s = _typical(plain, "total_s")
    verify_extra_s = _typical(samples, "verify_compute_s") - _typical(plain, "verify_compute_s")
    outside_extra_s = _typical(samples, "outside_s") - _typical(plain, "outside_s")
    return RelativeCosts(
        c=_typical(samples, "draft_compute_s") / gamma / plain_s,
        b=max(0.0, verify_extra_s) / gamma / plain_s,
        two_h=max(0.0, outside_extra_s) / plain_s,
    )


def paired_ratios(of_repeats: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Each repeat over the base of the same one: a machine's speed drifts from one to the next."""
    return tuple(a / b for a, b in zip(of_repeats, base, strict=True))


def _speeds(samples: Sequence[Sample]) -> tuple[float, ...]:
    return tuple(sample.load.tokens_per_s for sample in samples)


def _later_token_s(samples: Sequence[Sample]) -> float:
    return median(sample.load.later_token_s for sample in samples)


def _typical(samples: Sequence[Sample], name: str) -> float:
    return median(float(getattr(sample.statistics, name)) for sample in samples)


def _of_rounds(shown: Callable[[Rounds], float | None], form: str) -> Callable[[Row], str]:
    """A cell that is empty where the router's figures are not to be had."""
    return lambda row: number(shown(row.rounds), form) if row.rounds else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "text": lambda row: row.setting.text,
    "T": lambda row: f"{row.setting.temperature:g}",
    "streams": lambda row: str(row.setting.concurrency),
    "gamma": lambda row: str(row.setting.gamma),
    "mean gamma": _of_rounds(lambda rounds: rounds.mean_gamma, ".1f"),
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "speed-up": lambda row: number(row.speedup, ".2f"),
    "after first tokens": lambda row: number(row.later_speedup, ".2f"),
    "theory": _of_rounds(lambda rounds: rounds.theory_speedup, ".2f"),
    "theory's gamma": _of_rounds(lambda rounds: rounds.theory_gamma, "d"),
    "alpha": _of_rounds(lambda rounds: rounds.alpha, ".3f"),
    "tau": _of_rounds(lambda rounds: rounds.tau, ".2f"),
    "first token ms p50 / p95": lambda row: milliseconds(*row.time_to_first_s),
    "chunk gap ms p50 / p95 / p99": lambda row: milliseconds(*row.chunk_gap_s),
    "draft ms": _of_rounds(lambda rounds: rounds.draft_s * 1e3, ".2f"),
    "verify ms": _of_rounds(lambda rounds: rounds.verify_s * 1e3, ".2f"),
    "of which steps ms": _of_rounds(lambda rounds: rounds.verify_compute_s * 1e3, ".2f"),
    "router ms": _of_rounds(lambda rounds: rounds.router_s * 1e3, ".2f"),
    "outside steps ms": _of_rounds(lambda rounds: rounds.outside_s * 1e3, ".2f"),
}
"""Of the report's table."""
