"""The benchmarks: what they are asked, what they measure on a tiny pair, and what they report."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import bundled
from tandem.__main__ import main
from tandem.bench import app, engine, exact, http_path, long_prompt, lookup, traffic
from tandem.bench.cli import SUBJECTS
from tandem.bench.options import LoadOptions, command_of
from tandem.bench.report import machine_name, percentiles, write_result
from tandem.bench.rows import COLUMNS, Sample, Setting, make_rows, make_settings
from tandem.live.client import Answer, Endpoint, Event, Load, LoadResult, Usage
from tandem.live.counters import Counters, parse_counters
from tandem.subjects import with_default_subject
from tests.tiny_models import save_model
from workers.errors import ConfigError

TARGET, DRAFT = (bundled.resolve(name) for name in (bundled.TARGET_NAME, bundled.DRAFT_NAME))


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["bench"], ["bench", "app"]),
            (["bench", "--gammas", "0"], ["bench", "app", "--gammas", "0"]),
            (["bench", "engine", "--repeats", "1"], ["bench", "engine", "--repeats", "1"]),
            (["bench", "--help"], ["bench", "--help"]),
            (["load", "--alone", "9"], ["load", "flood", "--alone", "9"]),
            (["load", "cancels"], ["load", "cancels"]),
            (["demo-train", "--output", "x"], ["demo-train", "--output", "x"]),
        ],
    )
    def test_without_a_subject_an_app_is_measured(
        self, arguments: list[str], expected: list[str]
    ) -> None:
        assert with_default_subject(arguments) == expected

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["engnie"], "invalid choice: 'engnie'"),
            (["--gammas", "x"], "--gammas: 'x' is neither a number from 0 to 64 nor dynamic"),
            (["--gammas", "65"], "--gammas: '65' is neither a number from 0 to 64 nor dynamic"),
            (["--concurrencies", "0"], "--concurrencies: '0' is no whole number of at least 1"),
            (["--num-prompts", "1.5"], "--num-prompts: '1.5' is no whole number of at least 1"),
            (["--temperatures", "3"], "--temperatures: '3' is no number from 0 to 2"),
            (["--temperatures", "warm"], "--temperatures: 'warm' is no number from 0 to 2"),
            (["--texts", "odd"], "--texts: invalid choice: 'odd'"),
            (["long-prompt", "--alone-s", "nan"], "--alone-s: 'nan' is no number above 0"),
            (["engine", "--gammas", "2"], "unrecognized arguments: --gammas 2"),
        ],
    )
    def test_values_that_cannot_be_are_refused(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main(["bench", *arguments])
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--target", "/no/such"], "model '/no/such': there is no such folder"),
            (["engine", "--target", "/no/such"], "model '/no/such': there is no such folder"),
            (["--concurrencies", "1", "16"], "with --num-prompts 8 only that many streams would"),
        ],
    )
    def test_what_cannot_be_measured_is_explained(
        self, arguments: list[str], message: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        folders = ["--output", str(tmp_path), "--work", str(tmp_path)]
        assert main(["bench", *arguments, *folders]) == 1
        assert message in caplog.text
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("subject", SUBJECTS)
    def test_the_command_in_a_report_asks_for_the_same(
        self, subject: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        name = subject.replace("-", "_")
        monkeypatch.setattr(f"tandem.bench.{name}.run", lambda options: asked.append(options) or "")
        words = [subject, "--max-tokens", "7"] if subject != "engine" else [subject]
        assert main(["bench", *words, "--no-compile", "--target", "t"]) == 0
        command = command_of(f"bench {subject}", asked[0])
        assert command.split()[:3] == ["tandem", "bench", subject]
        assert main(command.split()[1:]) == 0
        assert asked[0] == asked[1] != replace(asked[0], compile=True)


class TestReport:
    def test_a_page_keeps_each_command_s_last_result(self, tmp_path: Path) -> None:
        for command, tables in (("one", "| a |"), ("two", "| b |"), ("one", "| c |")):
            page = write_result(tmp_path, command, tables, {"path": tmp_path, "rows": [(1, 2)]})
        text = page.read_text()
        assert ("| a |" in text, "| b |" in text, "| c |" in text) == (False, True, True)
        results = json.loads(page.with_suffix(".json").read_text())
        assert results["one"]["rows"] == [[1, 2]]
        assert results["one"]["versions"]["torch"]
        assert results["one"]["hardware"]["num_cores"] > 0
        assert page.name.startswith(results["one"]["date"][:10])
        assert f"{results['one']['hardware']['memory_gib']} GiB" in text

    def test_a_machine_s_name_is_one_for_files(self) -> None:
        cpu = {"gpu": None, "cpu": "AMD EPYC 9B45", "num_cores": 2}
        assert machine_name(cpu) == "amd-epyc-9b45-2-cores"
        assert machine_name({**cpu, "gpu": "NVIDIA H100 (80GB)"}) == "nvidia-h100-80gb"

    def test_percentiles_are_interpolated_in_order(self) -> None:
        assert percentiles([3.0, 1.0, 2.0], (0, 50, 75, 100)) == (1.0, 2.0, 2.5, 3.0)
        assert percentiles([], (50, 95)) == ()


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


class ScriptedServer:
    """An app that answers at once."""

    endpoint = Endpoint(url="", model="m")

    def __init__(self) -> None:
        self.gammas: list[int | str] = []
        self.loads: list[Load] = []

    def set_gamma(self, gamma: int | str) -> None:
        self.gammas.append(gamma)

    def run(self, load: Load, *, concurrency: int) -> LoadResult:
        self.loads.append(load)
        rounds = [(1, 0, 0), *((n, 2 * n, 4 * n) for n in range(2, 40))]
        return make_result(50.0 / concurrency, usages(*rounds))

    def counters(self) -> Counters:
        return Counters({"spec_decode_num_drafts": float(len(self.loads))})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """What the benchmarks measure in place of an app that they would start."""
    server = ScriptedServer()
    for module in (app, lookup, traffic):
        monkeypatch.setattr(module, "measured_app", lambda *_, **__: nullcontext(server))
    return server


class TestApp:
    def test_gammas_take_turns_on_one_app(self, scripted: ScriptedServer, tmp_path: Path) -> None:
        table = app.run(app.Options(output=tmp_path, repeats=2, num_prompts=3))
        assert scripted.gammas == [0, 4, "dynamic"] * 3  # the first to warm up
        assert [len(load.prompts) for load in scripted.loads] == [2] * 3 + [3] * 6
        assert len({load.salt for load in scripted.loads}) == 9
        assert table.count("\n") == 2 + 3
        (page,) = tmp_path.glob("*.md")
        assert "## `tandem bench app --repeats 2 --num-prompts 3`" in page.read_text()

    def test_what_an_interruption_leaves_is_every_complete_repeat(
        self, scripted: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counters = scripted.counters

        def interrupt_the_second_repeat() -> Counters:
            if len(scripted.loads) == 3 + 3 + 2:  # the first three to warm up
                raise KeyboardInterrupt
            return counters()

        monkeypatch.setattr(scripted, "counters", interrupt_the_second_repeat)
        with pytest.raises(KeyboardInterrupt):
            app.run(app.Options(output=tmp_path))
        (data,) = tmp_path.glob("*.json")
        (result,) = json.loads(data.read_text()).values()
        assert [row["tokens_per_s_of_repeats"] for row in result["rows"]] == [[50.0]] * 3

    def test_edited_text_is_predicted_by_what_plain_decoding_wrote(
        self, scripted: ScriptedServer, tmp_path: Path
    ) -> None:
        app.run(app.Options(output=tmp_path, texts=("edit",), repeats=1, num_prompts=3))
        plain, *measured = scripted.loads
        assert not plain.predictions
        assert len(measured) == 3 + 3
        assert len({tuple(load.predictions) for load in measured}) == 1
        assert measured[0].predictions

    def test_each_mode_is_measured_and_predictions_where_there_are_any(
        self, scripted: ScriptedServer, tmp_path: Path
    ) -> None:
        options = app.Options(
            output=tmp_path,
            texts=("easy", "edit"),
            gammas=(0, 8),
            modes=("suffix", "predicted"),
            repeats=1,
        )
        app.run(options)
        modes = ["auto", "suffix", "auto", "suffix", "predicted"]
        assert [load.mode for load in scripted.loads[1:]] == modes * 2  # the first to warm up

    def test_without_a_model_none_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[dict[str, str]] = []
        monkeypatch.setattr(
            "tandem.live.server.live_server", lambda options, _: started.append(options)
        )
        for drafter in ("suffix", "suffix,model"):
            app.measured_app(app.Options(target=TARGET), (0,), drafter=drafter)
        assert [options["drafter"] for options in started] == ["suffix", "suffix,model"]
        assert ["draft" in options for options in started] == [False, True]


class TestLookup:
    def test_each_way_is_beside_transformers_prompt_lookup(
        self, scripted: ScriptedServer, tmp_path: Path
    ) -> None:
        options = lookup.Options(
            target=TARGET, num_prompts=2, max_tokens=8, repeats=2, output=tmp_path
        )
        rows = [line.split(" | ") for line in lookup.run(options).splitlines()[2:]]
        assert scripted.gammas == ["dynamic"]
        assert len(scripted.loads) == 3  # the first to warm up
        assert [row[0].strip("| ") for row in rows] == [*lookup.WAYS, "tandem, prompt_lookup"]
        assert rows[1][4] == "1.00"
        assert rows[1][5].startswith("2 of 2")  # as plain decoding


class TestTraffic:
    def test_one_controller_sees_all_texts(self, scripted: ScriptedServer, tmp_path: Path) -> None:
        table = traffic.run(traffic.Options(output=tmp_path, num_prompts=2))
        assert scripted.gammas == ["dynamic"]  # before, gamma 0 to warm up
        assert [len(load.prompts) for load in scripted.loads] == [2] * 4
        assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [*traffic.TEXTS]

    def test_a_round_is_told_by_the_usage_of_its_event(self) -> None:
        rounds = usages((1, 0, 0), (4, 3, 3), (6, 4, 7), (7, 4, 7))
        phase = traffic.make_phase("hard", make_result(5.0, rounds, rounds[:2]))
        assert phase.gammas == (3, 4, 0, 3)
        assert phase.alpha == 7 / 8  # of 3, 1 and 3 accepted, and one rejected

    def test_a_phase_has_settled_once_its_length_stays_near_the_last(self) -> None:
        falling = make_phase(*[6] * 30, *[0] * 200)
        assert falling.settled_gamma == 0
        assert 30 < falling.num_rounds_to_settle <= 30 + traffic.WINDOW
        assert make_phase(*[5] * 50).num_rounds_to_settle == traffic.WINDOW


def make_phase(*gammas: int) -> traffic.Phase:
    return traffic.Phase(text="hard", tokens_per_s=50.0, alpha=0.5, gammas=gammas)


class TestEngine:
    def test_a_row_per_step(self, tmp_path: Path) -> None:
        name = save_model(tmp_path / "pair", max_position_embeddings=512)
        options = engine.Options(
            target=name, draft=name, repeats=1, compile=False, output=tmp_path / "results"
        )
        table = engine.run(options)
        assert table.count("\n") == 2 + len(engine.STEPS)
        (data,) = options.output.glob("*.json")
        (result,) = json.loads(data.read_text()).values()
        times = ("products_s", "transformers_s", "target_s", "draft_s")
        assert all(row[name] > 0 for row in result["rows"] for name in times)


class TestExact:
    def test_no_text_differs_in_fp32(self, tmp_path: Path) -> None:
        """The bundled pair is stored in bf16; in an fp32 copy of the target nothing ties nearly."""
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        model.save_pretrained(tmp_path / "target")
        AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path / "target")
        options = exact.Options(
            target=str(tmp_path / "target"),
            num_prompts=9,
            max_tokens=24,
            compile=False,
            output=tmp_path,
        )
        lines = exact.run(options).splitlines()[2:]
        assert len(lines) == 5
        assert all(line.endswith("| 9 | 0 |  |") for line in lines)

    def test_a_text_that_differs_is_shown_with_its_gap(self) -> None:
        prompt, plain = [5, 6, 7], [8, 9, 10]
        (gap,) = exact.logit_gaps(TARGET, [prompt, prompt], [plain, plain], [plain, [8, 11, 3]])
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([[5, 6, 7, 8]])).logits[0, -1]
        assert gap == pytest.approx(float((logits[9] - logits[11]).abs()))


class TestLongPrompt:
    def test_gaps_and_tokens_are_told_apart_by_the_long_prompt(self) -> None:
        interference = long_prompt.Interference(
            began_s=1.0,
            sent_s=3.0,
            first_s=6.0,
            chunks=(make_chunks(0.0, 1.5, 2.0, 2.9, 5.0, 6.5, 7.0), make_chunks(1.0, 3.5)),
        )
        # 0.0 to 1.5: the other stream had yet to begin; 6.5 to 7.0: the long prompt was answered
        assert interference.gaps_alone() == pytest.approx([0.5, 0.9])
        assert interference.gaps_beside() == pytest.approx([2.1, 1.5, 2.5])
        assert interference.alone_tokens_per_s == 3 * 2 / 2.0
        assert interference.beside_tokens_per_s == 2 * 2 / 3.0

    def test_a_line_pools_the_repeats(self) -> None:
        measured = [
            long_prompt.Interference(
                began_s=0, sent_s=1, first_s=first_s, chunks=(make_chunks(0.1, 0.2, 0.3, 1.5),)
            )
            for first_s in (2.0, 3.0, 9.0)
        ]
        table = long_prompt.format_table({make_setting(4): measured}, 4000)
        assert table.splitlines()[2] == (
            "| easy | 0 | 1 | 4 | 4000 | 2.00 | 4.0 | 1.0 | 100 / 100 / 100 / 100 | "
            "1200 / 1200 / 1200 / 1200 |"
        )

    @pytest.mark.parametrize(("long_tokens", "expected"), [(None, 4088), (4088, 4088), (100, 100)])
    def test_it_fills_the_context_unless_told(self, long_tokens: int | None, expected: int) -> None:
        options = long_prompt.Options(long_tokens=long_tokens)
        assert long_prompt.long_prompt_len(options, 4096) == expected

    def test_what_does_not_fit_is_refused(self) -> None:
        message = "--long-tokens 4089 and --max-tokens 8 are more than the context of 4096"
        with pytest.raises(ConfigError, match=message):
            long_prompt.long_prompt_len(long_prompt.Options(long_tokens=4089), 4096)


class TestHttpPath:
    def test_the_cost_is_the_share_of_tokens_per_second_that_is_lost(self) -> None:
        pairs = [
            http_path.Pair(streams_s=streams_s, one_request_s=1.0) for streams_s in (2.0, 1.25, 1.0)
        ]
        options = http_path.Options(num_streams=4, max_tokens=10)
        table = http_path.format_table(options, pairs)
        assert table.splitlines()[2] == "| 4 | 32.0 | 40.0 | 20.0% (0.0% to 50.0%) |"


def make_chunks(*times_s: float) -> tuple[Event, ...]:
    """Two tokens each."""
    return tuple(
        Event(at_s=at_s, text="x", usage=usages((2 * index, 0, 0))[0])
        for index, at_s in enumerate(times_s)
    )
