"""From the samples of a setting to a row of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from cluster.bench import theory
from cluster.bench.client import LoadResult
from cluster.bench.theory import RelativeCosts

Gamma = int | Literal["dynamic"]
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
    """The router's RoundStatistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repeats of one setting; times in seconds."""

    setting: Setting
    tokens_per_s: float
    speedup: float
    """Over gamma 0 in the same run, where that is measured; else 0."""
    alpha: float
    """Accepted of tested draft tokens."""
    tau: float
    """Tokens per verified sequence and round."""
    mean_gamma: float
    """Draft tokens per sequence and round with drafts."""
    theory_speedup: float
    """For this alpha, mean gamma and the costs measured; 0 without a gamma 0 to compare to."""
    theory_gamma: int
    """What theory would choose."""
    time_to_first_s: tuple[float, ...]
    """p50, p95"""
    chunk_gap_s: tuple[float, ...]
    """p50, p95, p99 of the time between two chunks of a stream, each with a round's tokens."""
    draft_s: float
    verify_s: float
    verify_compute_s: float
    """Of verify_s, what the target spent in steps."""
    router_s: float
    """The router's own time per round."""
    outside_s: float
    """A round's time in neither a draft nor a target step."""


def make_rows(samples: Mapping[Setting, Sequence[Sample]]) -> list[Row]:
    return [_row(setting, of_setting, samples) for setting, of_setting in samples.items()]


def _row(
    setting: Setting, samples: Sequence[Sample], all_samples: Mapping[Setting, Sequence[Sample]]
) -> Row:
    statistics = [sample.statistics for sample in samples]
    num_tested = sum(s.num_tested for s in statistics)
    num_accepted = sum(s.num_accepted for s in statistics)
    num_drafts = sum(s.num_drafts for s in statistics)
    alpha = num_accepted / num_tested if num_tested else 0.0
    mean_gamma = sum(s.num_draft_tokens for s in statistics) / num_drafts if num_drafts else 0.0
    speed = _speed(samples)
    plain = all_samples.get(setting.plain, ())
    theory_speedup, theory_gamma = 0.0, 0
    if plain and num_drafts:
        costs = _costs(samples, plain, mean_gamma)
        theory_speedup = theory.speedup(alpha, mean_gamma, costs)
        theory_gamma = theory.best_gamma(alpha, costs, most=MOST_THEORY)
    first_s = [s for sample in samples for s in sample.load.time_to_first_s]
    gaps_s = [s for sample in samples for s in sample.load.chunk_gaps_s]
    return Row(
        setting=setting,
        tokens_per_s=speed,
        speedup=speed / _speed(plain) if plain else 0.0,
        alpha=alpha,
        tau=1 + num_accepted / num_drafts if num_drafts else 1.0,
        mean_gamma=mean_gamma,
        theory_speedup=theory_speedup,
        theory_gamma=theory_gamma,
        time_to_first_s=_percentiles(first_s, (50, 95)),
        chunk_gap_s=_percentiles(gaps_s, (50, 95, 99)),
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


def _speed(samples: Sequence[Sample]) -> float:
    return median(sample.load.tokens_per_s for sample in samples)


def _typical(samples: Sequence[Sample], name: str) -> float:
    return median(float(getattr(sample.statistics, name)) for sample in samples)


def _percentiles(values: Sequence[float], ranks: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(np.percentile(values, rank)) if values else 0.0 for rank in ranks)


def _ms(*seconds: float) -> str:
    return " / ".join(f"{s * 1e3:.0f}" for s in seconds)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "text": lambda row: row.setting.text,
    "T": lambda row: f"{row.setting.temperature:g}",
    "streams": lambda row: str(row.setting.concurrency),
    "gamma": lambda row: str(row.setting.gamma),
    "mean gamma": lambda row: f"{row.mean_gamma:.1f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "speed-up": lambda row: f"{row.speedup:.2f}",
    "theory": lambda row: f"{row.theory_speedup:.2f}",
    "theory's gamma": lambda row: str(row.theory_gamma),
    "alpha": lambda row: f"{row.alpha:.3f}",
    "tau": lambda row: f"{row.tau:.2f}",
    "first token ms p50 / p95": lambda row: _ms(*row.time_to_first_s),
    "chunk gap ms p50 / p95 / p99": lambda row: _ms(*row.chunk_gap_s),
    "draft ms": lambda row: f"{row.draft_s * 1e3:.2f}",
    "verify ms": lambda row: f"{row.verify_s * 1e3:.2f}",
    "of which steps ms": lambda row: f"{row.verify_compute_s * 1e3:.2f}",
    "router ms": lambda row: f"{row.router_s * 1e3:.2f}",
    "outside steps ms": lambda row: f"{row.outside_s * 1e3:.2f}",
}
"""Of the report's table."""
