"""Wrong starts as a person sees them: the process, its last line, its status."""

import io
import subprocess
import sys

import pytest

from tandem.__main__ import main
from tandem.console import Console
from tandem.serve import serve

TIMEOUT_S = 120


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "tandem", "serve"],
        ["-m", "ray.serve.scripts", "run", "deployments:app"],
    ],
    ids=["tandem", "serve"],
)
def test_a_wrong_model_ends_with_a_sentence_and_a_status(command: list[str]) -> None:
    words = ["target=/no/such", "drafter=none", "http_port=0", "grpc_port=0"]
    ended = run(sys.executable, *command, *words, "allow_unauthenticated_cluster=true")
    assert ended.returncode != 0
    output = (ended.stdout + ended.stderr).strip().splitlines()
    assert "model '/no/such': there is no such folder on this machine" in output[-1]
    assert "Traceback" not in ended.stderr
    assert len(output) <= 3


def test_help_ends_well() -> None:
    said = io.StringIO()
    assert serve(["--help"], Console(said)) == 0
    assert "usage: tandem serve [name=value ...]" in said.getvalue()


def test_a_wrong_option_is_said_in_a_sentence() -> None:
    said, complained = io.StringIO(), io.StringIO()
    assert serve(["gama=2"], Console(said, complained)) == 1
    assert said.getvalue() == ""
    assert complained.getvalue() == "there is no option 'gama'; did you mean 'gamma'?\n"


def test_other_commands_are_the_clusters(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["plan", "no-such-file.yaml"]) == 2
    assert "no-such-file.yaml cannot be read: No such file or directory" in caplog.text


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: tandem ")
    for name in ("serve", "plan", "chaos", "bench", "demo-train"):
        assert f"\n    {name} " in said
