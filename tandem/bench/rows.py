"""From the samples of a setting to a row of the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from tandem.bench.options import LoadOptions
from tandem.bench.report import milliseconds, number, percentiles
from tandem.live.client import LoadResult
from tandem.live.counters import Counters

DYNAMIC: Literal["dynamic"] = "dynamic"
AUTO = "auto"
"""Requests that leave it to the app who drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to load the app; settings that differ in gamma only are compared."""

    text: str
    temperature: float
    concurrency: int
    gamma: int | str
    mode: str = AUTO
    """Which drafter may draft; AUTO where none does."""

    def plain(self) -> "Setting":
        """The same load without drafts."""
        return replace(self, gamma=0, mode=AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One load under a setting."""

    load: LoadResult
    counters: Counters
    """The app's counts meanwhile, requests that the load leaves out included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repeats of one setting; times in seconds."""

    setting: Setting
    tokens_per_s: float
    tokens_per_s_of_repeats: tuple[float, ...]
    speedups: tuple[float, ...]
    """Tokens per second over those of gamma 0 in the same repeat; empty without a gamma 0."""
    later_speedup: float | None
    """The speed-up of a stream's tokens after its first, which leaves prompts out."""
    beside_best: tuple[float, ...]
    """Tokens per second of a dynamic gamma over those of the best fixed one, by repeat; else
    empty."""
    alpha: float | None
    """Accepted draft tokens over tested ones; None without drafts."""
    tau: float | None
    """Tokens per verified draft, the target's own included: 1 + accepted / drafts."""
    mean_gamma: float | None
    """Draft tokens per drafted sequence and round."""
    draft_s: float | None
    """Mean seconds of drafting in a round."""
    verify_s: float | None
    """Mean seconds of verifying in a round, prompts included."""
    router_s: float | None
    """Mean seconds of the router's own time in a round."""
    time_to_first_s: tuple[float, ...]
    """p50 and p95 of the time to a stream's first text."""
    chunk_gap_s: tuple[float, ...]
    """p50, p95 and p99 of the time between two chunks of a stream, each with a round's tokens."""


def make_settings(options: LoadOptions, modes: Sequence[str] = (AUTO,)) -> list[Setting]:
    """All settings, in the order of their comparisons; what has no drafts comes once."""
    settings = [
        Setting(
            text=text,
            temperature=temperature,
            concurrency=concurrency,
            gamma=gamma,
            mode=mode if gamma else AUTO,
        )
        for text in options.texts
        for temperature in options.temperatures
        for concurrency in options.concurrencies
        for mode in modes
        for gamma in options.gammas
    ]
    return list(dict.fromkeys(settings))


def make_rows(samples: Mapping[Setting, Sequence[Sample]]) -> list[Row]:
    """A row per setting, each beside its gamma 0 and the best fixed gamma of its kind."""
    return [_row(setting, samples) for setting in samples]


def _row(setting: Setting, samples: Mapping[Setting, Sequence[Sample]]) -> Row:
    own = samples[setting]
    plain = samples.get(setting.plain(), ())
    counters = [sample.counters for sample in own]
    speeds = _speeds(own)
    num_tested = _total(counters, "spec_decode_num_tested_tokens")
    num_drafts = _total(counters, "spec_decode_num_drafts")
    num_accepted = _total(counters, "spec_decode_num_accepted_tokens")
    num_drafted = _total(counters, "spec_decode_num_draft_tokens")
    return Row(
        setting=setting,
        tokens_per_s=median(speeds),
        tokens_per_s_of_repeats=speeds,
        speedups=paired_ratios(speeds, _speeds(plain)) if plain else (),
        later_speedup=_later_token_s(plain) / _later_token_s(own) if plain else None,
        beside_best=paired_ratios(speeds, _best_fixed(setting, samples)),
        alpha=num_accepted / num_tested if num_tested else None,
        tau=1 + num_accepted / num_drafts if num_drafts else None,
        mean_gamma=num_drafted / num_drafts if num_drafts else None,
        draft_s=_mean_s(counters, "draft"),
        verify_s=_mean_s(counters, "verify"),
        router_s=_mean_s(counters, "router"),
        time_to_first_s=percentiles([s for x in own for s in x.load.time_to_first_s], (50, 95)),
        chunk_gap_s=percentiles([s for x in own for s in x.load.chunk_gaps_s], (50, 95, 99)),
    )


def paired_ratios(speeds: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Each repeat over the base of the same one: a machine's speed drifts from one to the next.

    Empty without a base.
    """
    return tuple(a / b for a, b in zip(speeds, base, strict=True)) if base else ()


def _best_fixed(setting: Setting, samples: Mapping[Setting, Sequence[Sample]]) -> tuple[float, ...]:
    """The speeds of the best fixed gamma beside a dynamic one; empty if there is none."""
    fixed = [
        _speeds(measured)
        for other, measured in samples.items()
        if other.gamma != DYNAMIC
        and setting.gamma == DYNAMIC
        and other in (replace(setting, gamma=other.gamma), setting.plain())
    ]
    return max(fixed, key=median, default=())


def _speeds(samples: Sequence[Sample]) -> tuple[float, ...]:
    return tuple(sample.load.tokens_per_s for sample in samples)


def _later_token_s(samples: Sequence[Sample]) -> float:
    return median(sample.load.later_token_s for sample in samples)


def _total(counters: Sequence[Counters], name: str) -> float:
    return sum(counter[name] for counter in counters)


def _mean_s(counters: Sequence[Counters], phase: str) -> float | None:
    means = [mean for counter in counters if (mean := counter.mean_s(phase)) is not None]
    return median(means) if means else None


def with_spread(ratios: Sequence[float]) -> str:
    """The median of the repeats, and the least and the most; empty without any."""
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one run)"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "text": lambda row: row.setting.text,
    "T": lambda row: f"{row.setting.temperature:g}",
    "streams": lambda row: str(row.setting.concurrency),
    "mode": lambda row: row.setting.mode,
    "gamma": lambda row: str(row.setting.gamma),
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "/ gamma 0": lambda row: with_spread(row.speedups),
    "after first tokens": lambda row: number(row.later_speedup, ".2f"),
    "/ best fixed": lambda row: with_spread(row.beside_best),
    "mean gamma": lambda row: number(row.mean_gamma, ".1f"),
    "alpha": lambda row: number(row.alpha, ".3f"),
    "tau": lambda row: number(row.tau, ".2f"),
    "first token ms p50 / p95": lambda row: milliseconds(*row.time_to_first_s),
    "chunk gap ms p50 / p95 / p99": lambda row: milliseconds(*row.chunk_gap_s),
    "draft ms": lambda row: _ms(row.draft_s),
    "verify ms": lambda row: _ms(row.verify_s),
    "router ms": lambda row: _ms(row.router_s),
}
"""The columns of the table."""
