"""The command line of the benchmarks: what is refused, and a server that somebody else runs."""

import json
from pathlib import Path

import pytest

from tandem.__main__ import main
from tandem.bench.cli import SUBJECTS, with_default_subject
from tests.tandem.openai_server import OPENAI_FIELDS, OpenAIServer

URL = "http://127.0.0.1:9"
QUICK = ["--num-prompts", "3", "--max-tokens", "4"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bench"], ["bench", "app"]),
        (["bench", "--gammas", "0"], ["bench", "app", "--gammas", "0"]),
        (["bench", "open", "--rates", "1"], ["bench", "open", "--rates", "1"]),
        (["bench", "--help"], ["bench", "--help"]),
        (["demo-train", "--output", "x"], ["demo-train", "--output", "x"]),
    ],
)
def test_bench_without_a_subject_measures_an_app(arguments: list[str], expected: list[str]) -> None:
    assert with_default_subject(arguments) == expected


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_explains_its_options(
    subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", subject, "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in SUBJECTS[subject].options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opne"], "invalid choice: 'opne'"),
        (["--gammas", "x"], "--gammas: 'x' is neither a number from 0 to 64 nor dynamic"),
        (["--gammas", "65"], "--gammas: '65' is neither a number from 0 to 64 nor dynamic"),
        (["--concurrencies", "0"], "--concurrencies: '0' is no whole number of at least 1"),
        (["--num-prompts", "1.5"], "--num-prompts: '1.5' is no whole number of at least 1"),
        (["--temperatures", "3"], "--temperatures: '3' is no number from 0 to 2"),
        (["--texts", "odd"], "--texts: invalid choice: 'odd'"),
        (["open", "--rates", "0"], "--rates: '0' is no number above 0"),
        (["open", "--rates", "nan"], "--rates: 'nan' is no number above 0"),
        (["open", "--concurrencies", "2"], "unrecognized arguments: --concurrencies 2"),
        (["growth", "--gammas", "2"], "unrecognized arguments: --gammas 2"),
        (["growth", "--num-threads", "0"], "--num-threads: '0' is no whole number of at least 1"),
        (["long-prompt", "--url", URL], f"unrecognized arguments: --url {URL}"),
    ],
)
def test_values_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--url", URL, "--gammas", "0", "dynamic"],
            f"--gammas 0 dynamic cannot be used here: the server at {URL} stays as it was started",
        ),
        (["--url", URL, "--no-compile"], "--no-compile cannot be used here"),
        (["--url", URL, "--baselines"], "--baselines cannot be used here: without --target"),
        (["--url", URL, "--draft", "d"], "--draft d cannot be used here: without --target"),
        (["open", "--url", URL, "--target", "t"], "--target t cannot be used here"),
        (["--model", "m"], "--model m cannot be used here: it is for --url"),
        (["open", "--no-ignore-eos"], "--no-ignore-eos cannot be used here: it is for --url"),
        (["--target", "/no/such"], "model '/no/such': there is no such folder"),
        (["--url", URL, "--target", "/no/such"], "model '/no/such': there is no such folder"),
        (["growth", "--target", "/no/such"], "model '/no/such': there is no such folder"),
        (["--url", URL], f"no server answers at {URL}"),
        (["--concurrencies", "1", "16"], "with --num-prompts 8 only that many streams would run"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert main(["bench", *arguments, "--output", str(tmp_path)]) == 1
    assert message in caplog.text
    assert not (tmp_path / "grown-target").exists()


class TestUrl:
    def run(self, server: OpenAIServer, output: Path, *arguments: str) -> int:
        return main(["bench", *arguments, "--url", server.url, *QUICK, "--output", str(output)])

    def test_another_server_is_measured_as_it_is(
        self, server: OpenAIServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        arguments = ("app", "--concurrencies", "1", "3", "--repeats", "2")
        assert self.run(server, tmp_path, *arguments) == 0
        assert "| easy | 0 | 3 | as served |  |" in caplog.text
        report = json.loads((tmp_path / "bench.json").read_text())
        assert [row["setting"]["concurrency"] for row in report["rows"]] == [1, 3]
        assert {row["setting"]["gamma"] for row in report["rows"]} == {"as served"}
        assert {row["rounds"] for row in report["rows"]} == {None}
        assert report["transformers"] == []
        assert report["endpoint"]["url"] == server.url
        assert report["seeds"]["prompts"] == 0
        assert {request["model"] for request in server.requests} == {"first"}
        # warmed up by two prompts, then two repeats of three, and what keeps three streams running
        assert len(server.requests) >= 2 * (2 + 6)
        assert len(server.requests) == len({request["prompt"] for request in server.requests})

    def test_it_is_offered_requests_at_rates(
        self, server: OpenAIServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        arguments = ("open", "--rates", "90", "30", "--model", "second")
        assert self.run(server, tmp_path, *arguments) == 0
        report = json.loads((tmp_path / "open.json").read_text())
        assert report["rows"][0]["setting"] == {
            "text": "easy", "temperature": 0.0, "gamma": "as served", "rate": 30.0,
        }  # fmt: skip
        assert report["rows"][0]["num_requests"] == 3
        assert report["rows"][0]["mean_gamma"] is None
        assert {request["model"] for request in server.requests} == {"second"}
        assert (tmp_path / "open.png").read_bytes().startswith(b"\x89PNG")

    def test_rates_above_a_saturated_one_are_left_out(
        self, server: OpenAIServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        server.refuses_seed = 2  # the last of a load; two other prompts warm it up
        assert self.run(server, tmp_path, "open", "--rates", "50", "60", "70") == 0
        (row,) = json.loads((tmp_path / "open.json").read_text())["rows"]
        assert (row["setting"]["rate"], row["num_refused"], row["is_saturated"]) == (50, 1, True)
        assert "saturated at 50 requests/s, so not measured at 60" in caplog.text
        assert "not measured at 70" in caplog.text

    def test_a_server_without_ignore_eos_is_asked_without_it(
        self, server: OpenAIServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.known_fields = OPENAI_FIELDS
        assert self.run(server, tmp_path, "app", "--repeats", "1") == 1
        assert "refuses ignore_eos" in caplog.text
        assert "give --no-ignore-eos" in caplog.text
        assert self.run(server, tmp_path, "app", "--repeats", "1", "--no-ignore-eos") == 0
