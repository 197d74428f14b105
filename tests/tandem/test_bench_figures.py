"""From what was measured to what is reported."""

import json
import math
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tandem.bench.baselines import BATCH, PLAIN, BaselineRow
from tandem.bench.client import Event, LoadResult
from tandem.bench.growth import Growth, Point, Series, fit_line, fitting_lens, format_tables
from tandem.bench.long_prompt import (
    Interference,
    LongPromptOptions,
    long_prompt_len,
)
from tandem.bench.long_prompt import format_table as format_long_prompt
from tandem.bench.long_prompt import make_row as make_long_prompt_row
from tandem.bench.open_loop import OpenSetting, is_saturated, make_row, poisson_arrivals
from tandem.bench.open_loop import format_table as format_open
from tandem.bench.plots import plot_growth, plot_open
from tandem.bench.report import environment, percentiles, shown_options
from tandem.bench.rows import AS_SERVED, COLUMNS, Gamma, Row, Sample, Setting, make_rows
from tandem.bench.summary import (
    beside_best_fixed,
    beside_static_batch,
    format_batches,
    format_dynamic,
)
from tandem.bench.texts import make_long_text
from workers.errors import ConfigError

PNG = b"\x89PNG"


def make_result(num_tokens: int = 100, elapsed_s: float = 10.0) -> LoadResult:
    return LoadResult(
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / elapsed_s,
        elapsed_s=elapsed_s,
        time_to_first_s=(0.1, 0.2, 0.3),
        chunk_gaps_s=(0.01,) * 99 + (1.0,),
        durations_s=(1.0, 2.0, 3.0),
        texts=("a", "b", "c"),
    )


class TestReport:
    def test_percentiles_are_interpolated_in_order(self) -> None:
        assert percentiles([3.0, 1.0, 2.0], (0, 50, 75, 100)) == (1.0, 2.0, 2.5, 3.0)
        assert percentiles([], (50, 95)) == ()

    def test_it_says_of_what_and_on_what_it_was_made(self) -> None:
        made = environment()
        assert made["commit"]
        assert made["hardware"]["num_cores"] > 0
        assert made["hardware"]["memory_gib"] > 0
        assert {"python", "torch", "transformers", "ray"} <= made["versions"].keys()
        assert json.loads(json.dumps(made)) == made

    def test_options_are_shown_as_they_were_resolved(self) -> None:
        options = {"target": None, "output": Path("here"), "repeats": 3}
        shown = shown_options(options, target="grown")
        assert shown == {"target": "grown", "output": "here", "repeats": 3}


class TestArrivals:
    def test_a_seed_gives_one_pattern_at_every_rate(self) -> None:
        slow, fast = (poisson_arrivals(rate, 50, seed=3) for rate in (0.5, 2.0))
        assert slow == poisson_arrivals(0.5, 50, seed=3)
        assert slow == pytest.approx([4 * arrival for arrival in fast])
        assert slow != poisson_arrivals(0.5, 50, seed=4)

    def test_they_come_at_the_rate_and_without_memory(self) -> None:
        arrivals = poisson_arrivals(5.0, 4000, seed=0)
        assert arrivals == sorted(arrivals)
        assert min(arrivals) >= 0
        assert max(arrivals) <= 4000 / 5.0
        gaps = np.diff(arrivals)
        assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.01)
        # of an exponential law, whose share above its mean is 1 / e
        assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
        assert (gaps > gaps.mean()).mean() == pytest.approx(1 / math.e, abs=0.03)


class TestSaturation:
    @pytest.mark.parametrize(
        ("elapsed_s", "durations_s", "num_refused", "expected"),
        [
            (11.0, (2.0, 2.5), 0, False),  # the last one's own time is no backlog
            (13.9, (2.0, 2.5), 0, False),
            (14.1, (2.0, 9.0), 0, True),
            (30.0, (2.0, 18.0), 0, True),
            (11.0, (2.0, 2.5), 1, True),
        ],
    )
    def test_it_is_a_backlog_or_a_refusal(
        self,
        elapsed_s: float,
        durations_s: tuple[float, ...],
        num_refused: int,
        expected: bool,
    ) -> None:
        saturated = is_saturated(
            arriving_s=10.0,
            elapsed_s=elapsed_s,
            durations_s=durations_s,
            num_refused=num_refused,
        )
        assert saturated is expected

    def test_a_row_and_its_table_say_so(self, tmp_path: Path) -> None:
        rows = [
            make_row(
                OpenSetting(text="easy", temperature=0.0, gamma=gamma, rate=rate),
                make_result(),
                num_requests=4,
                mean_gamma=mean_gamma,
            )
            for gamma, rate, mean_gamma in ((0, 0.4, 0.0), ("dynamic", 1.0, 2.25))
        ]
        assert [row.is_saturated for row in rows] == [False, True]
        assert rows[0].arriving_s == 10
        plain, dynamic = format_open(rows).splitlines()[2:]
        assert plain == (
            "| easy | 0 | 0 | 0.0 | 0.4 | 10.0 | 200 / 290 / 298 | 10 / 10 / 20 | "
            "2.0 / 2.9 / 3.0 | 10.0 / 10.0 | 0 | no |"
        )
        assert dynamic.startswith("| easy | 0 | dynamic | 2.2 | 1 | 10.0 |")
        assert dynamic.endswith("| 4.0 / 10.0 | 0 | yes |")
        plot_open(rows, tmp_path / "open.png")
        assert (tmp_path / "open.png").read_bytes().startswith(PNG)


class TestGrowth:
    def test_a_line_is_found_exactly(self) -> None:
        fit = fit_line([1, 2, 4, 8], [0.030 + 0.002 * size for size in (1, 2, 4, 8)])
        assert (fit.start_s, fit.slope_s) == pytest.approx((0.030, 0.002))
        assert fit.r_squared == pytest.approx(1.0)

    def test_what_is_no_line_shows_in_what_it_explains(self) -> None:
        fit = fit_line([1, 2, 4, 8], [0.03, 0.03, 0.03, 0.09])
        assert 0.7 < fit.r_squared < 0.95
        assert fit_line([1, 2, 4], [0.03, 0.03, 0.03]).slope_s == pytest.approx(0.0)

    @pytest.mark.parametrize(
        ("longest", "expected"),
        [
            (8192, [128, 256, 512, 1024, 2048, 4096]),
            (4096, [128, 256, 512, 1024, 2048, 4096]),
            (4092, [128, 256, 512, 1024, 2048, 4092]),
            (256, [128, 256]),
        ],
    )
    def test_contexts_go_up_to_what_fits(
        self, longest: int, expected: list[int], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        assert fitting_lens(longest) == expected
        assert (f"{longest} tokens of context" in caplog.text) == (longest < 4096)

    def test_a_model_without_room_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"100 tokens of context, and the shortest .* is 128"):
            fitting_lens(100)

    def test_tables_have_a_line_per_size_and_slopes_in_words(self, tmp_path: Path) -> None:
        def series(step: str, grows: str, *points: tuple[int, int, float]) -> Series:
            return Series(
                step=step,
                grows=grows,
                points=tuple(Point(size=s, num_tokens=n, step_s=t) for s, n, t in points),
            )

        growth = Growth(
            max_position=4096,
            series=(
                series("verify 5 tokens", "context tokens", (1000, 5, 0.040), (2000, 5, 0.041)),
                series("verify 1 token each", "sequences", (1, 1, 0.030), (3, 3, 0.036)),
                series("verify", "draft tokens", (0, 1, 0.030), (1, 2, 0.031)),
                series("propose", "draft tokens", (1, 1, 0.002), (2, 2, 0.003)),
            ),
        )
        tables = format_tables(growth)
        assert "| 1000 | 40.00 | 8.00 |\n| 2000 | 41.00 | 8.20 |\n" in tables
        assert "| 3 | 36.00 | 12.00 |\n" in tables
        assert (
            "| 0 | 30.00 | 30.00 |  |  |\n"
            "| 1 | 31.00 | 15.50 | 2.00 | 2.00 |\n"
            "| 2 |  |  | 3.00 | 1.50 |\n"
        ) in tables
        assert "| verify 5 tokens | 39.00 | 1.00 ms per further 1000 tokens of context |" in tables
        assert "| verify 1 token each | 27.00 | 3.00 ms per further sequence |" in tables
        assert "| propose | 1.00 | 1.00 ms per further draft token |" in tables
        assert "positions for 4096 tokens" in tables
        plot_growth(growth, tmp_path / "growth.png")
        assert (tmp_path / "growth.png").read_bytes().startswith(PNG)


class TestLongPrompt:
    def test_gaps_are_told_apart_by_the_long_prompt(self) -> None:
        interference = Interference(
            began_s=1.0,
            sent_s=3.0,
            first_s=6.0,
            chunks=(make_chunks(0.0, 1.5, 2.0, 2.9, 5.0, 6.5, 7.0), make_chunks(1.0, 3.5)),
        )
        # 0.0 to 1.5: the other stream had yet to begin; 6.5 to 7.0: the long prompt was answered
        assert interference.gaps_alone() == pytest.approx([0.5, 0.9])
        assert interference.gaps_beside() == pytest.approx([2.1, 1.5, 2.5])
        assert interference.texts_alone() == ["1.5 2.0 2.9 ", ""]
        assert interference.texts_beside() == ["5.0 ", "3.5 "]

    def test_a_row_pools_the_repeats(self) -> None:
        setting = Setting(text="easy", temperature=0.0, concurrency=1, gamma=4)
        measured = [
            Interference(
                began_s=0, sent_s=1, first_s=first_s, chunks=(make_chunks(0.1, 0.2, 0.3, 1.5),)
            )
            for first_s in (2.0, 3.0, 9.0)
        ]
        row = make_long_prompt_row(setting, measured, 4000, count_tokens=len)
        assert (row.num_gaps_alone, row.num_gaps_beside, row.time_to_first_s) == (6, 3, 2.0)
        assert format_long_prompt([row]).splitlines()[2] == (
            "| easy | 0 | 1 | 4 | 4000 | 2.00 | 12.0 | 2.0 | 100 / 100 / 100 / 100 | "
            "1200 / 1200 / 1200 / 1200 | 6 / 3 |"
        )

    @pytest.mark.parametrize(("long_tokens", "expected"), [(None, 4088), (4088, 4088), (100, 100)])
    def test_it_fills_the_context_unless_told(self, long_tokens: int | None, expected: int) -> None:
        assert long_prompt_len(make_long_options(long_tokens), 4096) == expected

    def test_what_does_not_fit_is_refused(self) -> None:
        message = "--long-tokens 4089 and --max-tokens 8 are more than the context of 4096"
        with pytest.raises(ConfigError, match=message):
            long_prompt_len(make_long_options(4089), 4096)

    def test_long_texts_are_seeded_and_of_any_length(self) -> None:
        text = make_long_text(2_000_000, seed=1)  # more than all held-out files have
        assert len(text) == 2_000_000
        assert make_long_text(5000, seed=1) == text[:5000]
        assert make_long_text(5000, seed=2) != text[:5000]


def make_chunks(*times_s: float) -> tuple[Event, ...]:
    return tuple(Event(at_s=at_s, text=f"{at_s} ", num_tokens=None) for at_s in times_s)


def make_long_options(long_tokens: int | None) -> LongPromptOptions:
    return LongPromptOptions(
        remote=None,
        target=None,
        draft=None,
        gammas=(0,),
        max_tokens=8,
        seed=0,
        with_compile=False,
        output=Path(),
        texts=("easy",),
        temperatures=(0.0,),
        concurrencies=(4,),
        long_tokens=long_tokens,
        alone_s=5.0,
        repeats=1,
    )


def make_row_of(
    gamma: Gamma, *of_repeats: float, concurrency: int = 8, temperature: float = 0.0
) -> Row:
    tokens_per_s = median(of_repeats)
    setting = Setting(text="easy", temperature=temperature, concurrency=concurrency, gamma=gamma)
    return Row(
        setting=setting,
        tokens_per_s=tokens_per_s,
        tokens_per_s_of_repeats=of_repeats,
        speedup=None,
        later_speedup=None,
        time_to_first_s=(),
        chunk_gap_s=(),
        rounds=None,
    )


class TestSummary:
    def test_dynamic_stands_beside_the_best_fixed_of_its_kind(self) -> None:
        rows = [
            make_row_of(0, 100.0, 80.0, 80.0),
            make_row_of(4, 120.0, 60.0, 160.0),  # the machine was slow in the second repeat
            make_row_of("dynamic", 90.0, 60.0, 112.0),
            make_row_of(0, 50.0, concurrency=1),
            make_row_of("dynamic", 60.0, concurrency=1),
            make_row_of("dynamic", 70.0, concurrency=2),  # without a fixed one
            make_row_of(2, 70.0, concurrency=4),  # without a dynamic one
        ]
        best = beside_best_fixed(rows)
        assert [(row.concurrency, row.best_gamma, row.ratio) for row in best] == [
            (8, 4, 0.75),
            (1, 0, 1.2),
        ]
        assert best[0].ratios == (0.75, 1.0, 0.7)
        lines = format_dynamic(best).splitlines()
        assert lines[2] == "| easy | 0 | 8 | 4 | 120.0 | 90.0 | 0.75 | 0.70 - 1.00 |"

    def test_eight_greedy_streams_stand_beside_the_static_batch(self) -> None:
        baselines = [
            BaselineRow(text="easy", name=PLAIN, tokens_per_s=10.0),
            BaselineRow(text="easy", name=BATCH, tokens_per_s=50.0),
            BaselineRow(text="hard", name=BATCH, tokens_per_s=1.0),
        ]
        rows = [
            make_row_of(0, 110.0),
            make_row_of("dynamic", 122.0),
            make_row_of(0, 30.0, concurrency=1),
            make_row_of(0, 100.0, temperature=0.8),
        ]
        beside = beside_static_batch(rows, baselines)
        assert [(row.gamma, row.ratio) for row in beside] == [(0, 2.2), ("dynamic", 2.44)]
        lines = format_batches(beside).splitlines()
        assert lines[3] == "| easy | dynamic | 122.0 | 50.0 | 2.44 x the static batch of 8 |"
        assert beside_static_batch(rows, baselines[:1]) == []


def test_a_server_that_is_not_ours_has_no_figures_of_rounds() -> None:
    setting = Setting(text="easy", temperature=0.0, concurrency=1, gamma=AS_SERVED)
    (row,) = make_rows({setting: [Sample(load=make_result(), statistics=None)]})
    assert (row.tokens_per_s, row.speedup, row.rounds) == (10.0, None, None)
    cells = {name: cell(row) for name, cell in COLUMNS.items()}
    assert cells["gamma"] == "as served"
    assert cells["first token ms p50 / p95"] == "200 / 290"
    assert {name for name, shown in cells.items() if shown == ""} == {
        "mean gamma", "speed-up", "after first tokens", "theory",
        "theory's gamma", "alpha", "tau", "draft ms", "verify ms",
        "of which steps ms", "router ms", "outside steps ms",
    }  # fmt: skip
