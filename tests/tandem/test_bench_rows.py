"""The rows of a benchmark's table: counters, speeds, rounds."""

from dataclasses import replace

import pytest

from tandem.bench.options import LoadOptions
from tandem.bench.rows import COLUMNS, make_rows, make_settings, with_spread
from tandem.live.counters import Counters, parse_counters
from tests.tandem.results import make_sample, make_setting

METRICS = """# TYPE ray_tandem_spec_decode_num_drafts_total counter
ray_tandem_spec_decode_num_drafts_total{WorkerId="a"} 3.0
ray_tandem_spec_decode_num_drafts_total{WorkerId="b"} 4.0
ray_tandem_round_phase_seconds_sum{phase="draft",WorkerId="a"} 0.5
ray_tandem_round_phase_seconds_count{phase="draft",WorkerId="a"} 10.0
ray_tandem_round_phase_seconds_bucket{le="0.1",phase="draft"} 10.0
ray_node_cpu_count{ip="x"} 2.0
"""


def test_counters_are_summed_over_processes_and_told_as_differences() -> None:
    now = parse_counters(METRICS)
    before = Counters({"spec_decode_num_drafts": 2.0, "round_phase_seconds_count:draft": 5.0})
    since = now.since(before)
    assert since["spec_decode_num_drafts"] == 5.0
    assert since["never_counted"] == 0.0
    assert since.mean_s("draft") == 0.1
    assert since.mean_s("verify") is None


class TestRows:
    def test_speeds_are_compared_within_a_repeat(self) -> None:
        samples = {
            make_setting(0): [make_sample(s) for s in (10, 5, 10)],
            make_setting(4): [make_sample(s) for s in (24, 25, 100)],
            make_setting(2): [make_sample(s) for s in (20, 20, 20)],
            make_setting("dynamic"): [make_sample(s) for s in (36, 25, 75)],
            make_setting("dynamic", concurrency=2): [make_sample(7)],
        }
        plain, four, _, dynamic, alone = make_rows(samples)
        assert (four.tokens_per_s, four.speedups) == (25, (2.4, 5, 10))
        assert (plain.speedups, plain.beside_best) == ((1, 1, 1), ())
        assert dynamic.beside_best == (1.5, 1.0, 0.75)  # beside gamma 4
        assert (alone.speedups, alone.beside_best, alone.later_speedup) == ((), (), None)
        # 0.1 s of each stream after its first token, of which there is one
        assert four.later_speedup == pytest.approx((25 - 1) / (10 - 1))
        cells = {name: cell(dynamic) for name, cell in COLUMNS.items()}
        assert cells["/ best fixed"] == "1.00 (0.75 to 1.50)"
        assert cells["alpha"] == cells["draft ms"] == ""

    def test_rounds_are_what_the_app_counted(self) -> None:
        counts: dict[str, float] = {
            "spec_decode_num_drafts": 50, "spec_decode_num_draft_tokens": 200,
            "spec_decode_num_tested_tokens": 150, "spec_decode_num_accepted_tokens": 120,
            "round_phase_seconds_sum__draft": 0.2, "round_phase_seconds_count__draft": 50,
        }  # fmt: skip
        (row,) = make_rows({make_setting(4): [make_sample(24, **counts)] * 2})
        assert (row.alpha, row.mean_gamma, row.tau) == (0.8, 4, 1 + 120 / 50)
        assert (row.draft_s, row.verify_s) == (0.004, None)
        assert (row.time_to_first_s, row.chunk_gap_s[0]) == ((0.1, 0.1), pytest.approx(0.1))

    def test_settings_that_are_compared_follow_each_other(self) -> None:
        options = LoadOptions(texts=("easy", "hard"), gammas=(0, "dynamic"), concurrencies=(1, 8))
        settings = make_settings(options)
        assert len(settings) == 8
        assert [s.gamma for s in settings] == [0, "dynamic"] * 4
        of_modes = make_settings(replace(options, concurrencies=(1,)), ["model", "suffix"])
        assert [(s.text, s.gamma, s.mode) for s in of_modes[:3]] == [
            ("easy", 0, "auto"),
            ("easy", "dynamic", "model"),
            ("easy", "dynamic", "suffix"),
        ]
        assert len(of_modes) == 6

    def test_each_mode_is_compared_with_no_drafts_and_its_own_fixed_lengths(self) -> None:
        dynamic = make_setting("dynamic")
        samples = {
            make_setting(0): [make_sample(10)],
            replace(make_setting(4), mode="suffix"): [make_sample(50)],
            replace(dynamic, mode="model"): [make_sample(20)],
            replace(dynamic, mode="suffix"): [make_sample(25)],
        }
        _, _, model, suffix = make_rows(samples)
        assert (model.speedups, model.beside_best) == ((2,), (2,))
        assert (suffix.speedups, suffix.beside_best) == ((2.5,), (0.5,))


def test_a_single_run_is_not_shown_as_if_it_had_a_spread() -> None:
    assert with_spread([1.2, 0.9, 1.0]) == "1.00 (0.90 to 1.20)"
    assert with_spread([1.2]) == "1.20 (one run)"
    assert with_spread([]) == ""
