"""The benchmarks: what they are asked, what they measure on a tiny pair, and what they report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.__main__ import main
from tandem.bench import engine, exact, http_path, long_prompt
from tandem.bench.cli import SUBJECTS
from tandem.bench.options import command_of
from tandem.bench.report import machine_name, percentiles, write_result
from tandem.live.client import Event
from tandem.subjects import with_default_subject
from tests.tandem.results import make_setting, usages
from tests.tandem.test_bench_app import TARGET
from tests.tiny_models import save_model
from workers.errors import ConfigError


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
            max_tokens=10,
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
