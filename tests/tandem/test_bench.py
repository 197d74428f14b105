"""The benchmarks run, on a tiny pair, and report what they measured."""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import bundled
from deployments import AppArgs
from tandem.__main__ import main
from tandem.bench import served, theory
from tandem.bench.baselines import ASSISTED, BATCH, LOOKUP, PLAIN, Baselines
from tandem.bench.client import Endpoint, LoadResult
from tandem.bench.engine import STEPS, run_engine_bench
from tandem.bench.exactness import ExactnessOptions, _gaps, run_exactness
from tandem.bench.growth import MOST_DRAFTS, NUM_SEQUENCES, run_growth
from tandem.bench.open_loop import OpenOptions, run_open_loop
from tandem.bench.plots import plot_speedups, plot_traffic
from tandem.bench.rows import Gamma, Sample, Setting, make_rows
from tandem.bench.run import BenchOptions, run_bench
from tandem.bench.steps import EngineOptions
from tandem.bench.texts import KINDS, make_prompts
from tandem.bench.theory import RelativeCosts
from tandem.bench.traffic import WINDOW, Phase, TrafficOptions, run_traffic
from tests.tandem.openai_server import OpenAIServer
from tests.tiny_models import save_model
from workers.errors import ConfigError
from workers.model import load_model

TARGET, DRAFT = (bundled.resolve(name) for name in (bundled.TARGET_NAME, bundled.DRAFT_NAME))


def test_every_way_of_transformers_runs() -> None:
    baselines = Baselines(TARGET, DRAFT)
    assert baselines.names == (PLAIN, *ASSISTED, LOOKUP, BATCH)
    prompts = ["def read(path):\n", "import os\n"]
    for name in baselines.names:
        assert baselines.generate(name, prompts, 6) == 2 * 6, name


def test_without_a_draft_nothing_assists_transformers() -> None:
    assert Baselines(TARGET, None).names == (PLAIN, LOOKUP, BATCH)


def engine_options(tmp_path: Path, **changes: Any) -> EngineOptions:
    """Of a tiny pair; `changes` are of its configuration."""
    name = save_model(tmp_path / "pair", **{"max_position_embeddings": 512, **changes})
    return EngineOptions(
        target=name, draft=name, repeats=1, num_threads=None, with_compile=False, output=tmp_path
    )


def test_engine_report_has_a_row_per_step(tmp_path: Path) -> None:
    rows = run_engine_bench(engine_options(tmp_path))
    assert [(row.num_sequences, row.num_tokens) for row in rows] == list(STEPS)
    assert all(
        min(row.products_s, row.transformers_s, row.target_s, row.draft_s) > 0 for row in rows
    )
    report = json.loads((tmp_path / "engine.json").read_text())
    assert len(report["rows"]) == len(STEPS)
    assert report["versions"]["torch"]
    assert (tmp_path / "engine.md").read_text().count("\n") == 2 + len(STEPS)


def test_growth_report_has_every_point_and_a_slope_per_series(tmp_path: Path) -> None:
    growth = run_growth(engine_options(tmp_path))
    assert [(series.step, [p.size for p in series.points]) for series in growth.series] == [
        ("verify 1 token", [128, 256, 508]),
        ("verify 5 tokens", [128, 256, 508]),
        ("verify 1 token each", list(NUM_SEQUENCES)),
        ("verify", list(range(MOST_DRAFTS + 1))),
        ("propose", list(range(1, MOST_DRAFTS + 1))),
    ]
    assert all(point.step_s > 0 for series in growth.series for point in series.points)
    assert [p.num_tokens for p in growth.of("sequences")[0].points] == list(NUM_SEQUENCES)
    report = json.loads((tmp_path / "growth.json").read_text())
    assert report["max_position"] == 512
    assert all(math.isfinite(series["fit"]["slope_s"]) for series in report["series"])
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "growth.md").read_text().count("ms per further") == len(growth.series)


def test_a_model_too_short_for_the_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has positions for 205 tokens, and this benchmark runs"):
        run_growth(engine_options(tmp_path, max_position_embeddings=205))


def test_no_text_differs_in_fp32(tmp_path: Path) -> None:
    """The bundled pair is stored in bf16; in a copy of the target in fp32 nothing ties nearly."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path / "target")
    options = ExactnessOptions(
        target=str(tmp_path / "target"),
        draft=DRAFT,
        num_prompts=9,
        max_tokens=24,
        with_compile=False,
        output=tmp_path,
    )
    rows = run_exactness(options)
    assert len(rows) == 5
    assert all((row.num_texts, row.gaps) == (9, ()) for row in rows)


def test_a_text_that_differs_is_shown_with_its_gap() -> None:
    reference = load_model(TARGET, dtype="float32")
    prompt, plain = [5, 6, 7], [8, 9, 10]
    (gap,) = _gaps(reference, [prompt, prompt], [plain, plain], [plain, [8, 11, 3]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)(
            torch.tensor([[5, 6, 7, 8]])
        ).logits[0, -1]
    assert gap == pytest.approx(float((logits[9] - logits[11]).abs()), abs=1e-4)


@pytest.mark.parametrize(("alpha", "c", "best", "gain"), [
    (0.5, 0.01, 5, 1.88), (0.8, 0.05, 8, 3.09), (0.9, 0.1, 10, 3.43), (0.6, 0.3, 1, 1.23),
])  # fmt: skip
def test_theory_is_that_of_the_paper(alpha: float, c: float, best: int, gain: float) -> None:
    costs = RelativeCosts(c=c, b=0.0, two_h=0.0)
    assert theory.best_gamma(alpha, costs, most=40) == best
    assert theory.speedup(alpha, best, costs) == pytest.approx(gain, abs=0.01)


def test_theory_drafts_nothing_where_it_does_not_pay() -> None:
    assert theory.best_gamma(0.3, RelativeCosts(c=0.2, b=0.2, two_h=0.1), most=16) == 0
    assert theory.expected_tokens(1.0, 4) == 5


def test_a_dynamic_gamma_is_measured_as_the_app_has_it() -> None:
    assert AppArgs().num_speculative_tokens == served.DYNAMIC_MAX


def make_sample(tokens_per_s: float, **statistics: Any) -> Sample:
    load = LoadResult(
        num_tokens=int(tokens_per_s * 10),
        tokens_per_s=tokens_per_s,
        elapsed_s=10.0,
        time_to_first_s=(0.1, 0.2, 0.3),
        chunk_gaps_s=(0.01,) * 99 + (1.0,),
        durations_s=(1.1, 1.2, 1.3),
        texts=(),
    )
    zeros = dict.fromkeys(
        ("num_tested", "num_accepted", "num_drafts", "num_draft_tokens", "draft_s",
         "draft_compute_s", "verify_s", "verify_compute_s", "router_s", "outside_s", "total_s"), 0.0
    )  # fmt: skip
    return Sample(load=load, statistics=SimpleNamespace(**{**zeros, **statistics}))


def test_a_row_sets_the_measured_speedup_beside_theory() -> None:
    plain, drafted = (
        Setting(text="easy", temperature=0.0, concurrency=1, gamma=gamma) for gamma in (0, 4)
    )
    counts: dict[str, Any] = {
        "num_drafts": 100, "num_draft_tokens": 400, "num_tested": 300, "num_accepted": 240,
    }  # fmt: skip
    samples = {
        plain: [
            make_sample(speed, total_s=0.1, verify_compute_s=0.09, outside_s=0.01)
            for speed in (10, 5, 10)
        ],
        drafted: [
            make_sample(
                speed, draft_compute_s=0.02, verify_compute_s=0.098, outside_s=0.02, **counts
            )
            for speed in (24, 25, 100)
        ],
    }
    _, row = make_rows(samples)
    assert (row.tokens_per_s, row.speedup) == (25, 5)  # medians; of 2.4, 5 and 10
    assert row.tokens_per_s_of_repeats == (24, 25, 100)
    # a second of each stream after its first token, of which there are three
    assert row.later_speedup == pytest.approx((250 - 3) / (100 - 3))
    assert row.rounds is not None
    assert (row.rounds.alpha, row.rounds.mean_gamma, row.rounds.tau) == (0.8, 4, 1 + 240 / 100)
    # c = 0.05, b = 0.02, 2 h = 0.1
    assert row.rounds.theory_speedup == pytest.approx((1 - 0.8**5) / 0.2 / (1 + 4 * 0.07 + 0.1))
    assert row.chunk_gap_s[:2] == (0.01, 0.01)
    assert row.chunk_gap_s[2] > 0.01


def test_theory_is_silent_where_most_rounds_had_no_drafts() -> None:
    plain, dynamic = (
        Setting(text="easy", temperature=0.0, concurrency=1, gamma=gamma)
        for gamma in (0, "dynamic")
    )
    counts: dict[str, Any] = {"num_drafts": 1, "num_draft_tokens": 4, "num_tested": 2}
    samples = {
        plain: [make_sample(10, total_s=0.1)],
        dynamic: [make_sample(9, draft_compute_s=0.0, **counts)],
    }
    _, row = make_rows(samples)
    assert row.speedup == 0.9
    assert row.rounds is not None
    assert (row.rounds.theory_speedup, row.rounds.theory_gamma) == (None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_and_seeded(kind: str) -> None:
    prompts = make_prompts(kind, 8)
    assert len(set(prompts)) == 8
    assert prompts == make_prompts(kind, 8)
    assert all(200 <= len(prompt) <= 400 for prompt in prompts)


BASELINE = {"text": "easy", "name": "generate", "tokens_per_s": 10.0}


def test_two_reports_are_compared_by_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(name: str, speed: float, gammas: tuple[object, ...]) -> str:
        setting = {"text": "easy", "temperature": 0.0, "concurrency": 1}
        rows = [{"setting": {**setting, "gamma": g}, "tokens_per_s": speed} for g in gammas]
        report = {"rows": rows, "transformers": [BASELINE]}
        (tmp_path / name).write_text(json.dumps(report))
        return str(tmp_path / name)

    before, after = write("a.json", 40.0, (0, 4)), write("b.json", 60.0, (4, "dynamic"))
    caplog.set_level("INFO")
    assert main(["bench", "compare", before, after]) == 0
    assert "| easy, T 0, 1 streams, gamma 4 | 40.0 | 60.0 | 1.50 |" in caplog.text
    assert "| easy, transformers, generate | 10.0 | 10.0 | 1.00 |" in caplog.text
    assert "gamma 0" not in caplog.text


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([], "compare takes two reports, not 0"),
        (["missing.json", "missing.json"], "missing.json is no report of `bench`"),
    ],
)
def test_compare_explains_what_it_needs(
    reports: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["bench", "compare", *reports]) == 1
    assert message in caplog.text


class ScriptedServer:
    """An app whose router is this object."""

    def __init__(self, server: OpenAIServer) -> None:
        server.known_fields |= {"cache_salt"}
        self.endpoint = Endpoint(url=server.url, model="first", is_ours=True)
        self.gammas: list[Gamma] = []

    def set_gamma(self, gamma: Gamma) -> None:
        self.gammas.append(gamma)

    def take_statistics(self) -> Any:
        return make_sample(1, gammas=(4.0,) * 30, num_tested=4, num_accepted=3).statistics

    def wait_until_idle(self) -> None:
        """No client is waited for."""


@pytest.fixture
def app(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """What the benchmarks measure in place of an app that they would start."""
    scripted = ScriptedServer(server)
    for module in ("run", "traffic", "open_loop"):
        monkeypatch.setattr(
            f"tandem.bench.{module}.measured_server", lambda _: nullcontext(scripted)
        )
    return scripted


def served_options(tmp_path: Path) -> dict[str, Any]:
    return {
        "remote": None, "target": TARGET, "draft": DRAFT, "gammas": (0, 4, "dynamic"),
        "max_tokens": 3, "seed": 0, "with_compile": False, "output": tmp_path, "num_prompts": 2,
    }  # fmt: skip


def bench_options(tmp_path: Path, *, repeats: int) -> BenchOptions:
    return BenchOptions(
        **served_options(tmp_path),
        texts=("easy",),
        temperatures=(0.0,),
        concurrencies=(2,),
        repeats=repeats,
        with_baselines=False,
    )


def test_gammas_take_turns_on_one_app(app: ScriptedServer, tmp_path: Path) -> None:
    result = run_bench(bench_options(tmp_path, repeats=2))
    assert app.gammas == [0, 4, "dynamic"] * 3  # the first to warm up
    assert [row.setting.gamma for row in result.rows] == [0, 4, "dynamic"]
    assert [row.rounds is not None for row in result.rows] == [True] * 3
    report = json.loads((tmp_path / "bench.json").read_text())
    (beside,) = report["dynamic_beside_best_fixed"]
    assert beside["best_gamma"] in (0, 4)
    assert report["seeds"]["prompts"] == 0
    assert report["hardware"]["num_cores"] > 0
    assert "dynamic / best fixed" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "speedup.png").exists()


def test_what_an_interruption_leaves_is_every_complete_repeat(
    app: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gamma = app.set_gamma

    def interrupt_the_second_repeat(gamma: Gamma) -> None:
        set_gamma(gamma)
        if len(app.gammas) == 3 + 3 + 2:  # the first three to warm up
            raise KeyboardInterrupt

    monkeypatch.setattr(app, "set_gamma", interrupt_the_second_repeat)
    with pytest.raises(KeyboardInterrupt):
        run_bench(bench_options(tmp_path, repeats=3))
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["num_repeats"] == 1
    assert [row["setting"]["gamma"] for row in report["rows"]] == [0, 4, "dynamic"]


def test_gammas_take_turns_at_every_rate(app: ScriptedServer, tmp_path: Path) -> None:
    options = OpenOptions(
        **served_options(tmp_path), texts=("easy",), temperatures=(0.0,), rates=(40.0, 20.0)
    )
    rows = run_open_loop(options)
    assert [(row.setting.rate, row.setting.gamma) for row in rows[:3]] == [
        (20, 0), (20, 4), (20, "dynamic"),
    ]  # fmt: skip
    assert app.gammas[:6] == [0, 4, "dynamic"] * 2
    assert {row.mean_gamma for row in rows} == {4.0}


def test_traffic_changes_under_one_controller(app: ScriptedServer, tmp_path: Path) -> None:
    phases = run_traffic(TrafficOptions(**served_options(tmp_path)))
    assert app.gammas == [0, "dynamic"]  # plain to warm up
    assert [(phase.text, phase.alpha) for phase in phases] == [
        ("easy", 0.75), ("hard", 0.75), ("easy", 0.75),
    ]  # fmt: skip
    assert (tmp_path / "traffic.png").exists()


def make_phase(text: str, gammas: Sequence[float]) -> Phase:
    return Phase(text=text, tokens_per_s=50.0, alpha=0.5, gammas=tuple(gammas))


def test_a_phase_has_settled_once_its_length_stays_near_the_last() -> None:
    falling = make_phase("hard", [6.0] * 30 + [0.0] * 200)
    assert falling.settled_gamma == 0
    assert 30 < falling.num_rounds_to_settle <= 30 + WINDOW
    assert make_phase("easy", [5.0] * 50).num_rounds_to_settle == WINDOW


def test_plots_are_written(tmp_path: Path) -> None:
    plain, drafted = (
        Setting(text="easy", temperature=0.0, concurrency=2, gamma=gamma) for gamma in (0, 4)
    )
    rows = make_rows({plain: [make_sample(10)], drafted: [make_sample(20)]})
    plot_speedups(rows, tmp_path / "speedup.png")
    plot_traffic([make_phase("easy", [4.0, 5.0]), make_phase("hard", [0.0])], tmp_path / "t.png")
    for name in ("speedup.png", "t.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
