"""Wrong starts as a person sees them: the process, its last line, its status."""

import io
import re
import signal
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from deployments.args import AppArgs
from tandem.__main__ import main
from tandem.console import Console, WorkerLog
from tandem.serve import _watch, serve
from tandem.server import Server

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
    assert said.getvalue() == "checking the options and the models\n"
    assert complained.getvalue() == "there is no option 'gama'; did you mean 'gamma'?\n"


def test_other_commands_are_the_clusters(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["plan", "no-such-file.yaml"]) == 2
    assert "no-such-file.yaml cannot be read: No such file or directory" in caplog.text


def test_ctrl_c_in_mid_import_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.__main__._run", interrupted)
    assert main(["serve"]) == 130


def test_the_id_of_a_process_that_ended_may_be_a_thread_s(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(AppArgs(), WorkerLog(Console()))
    gone = Mock(**{"is_running.return_value": False, "wait.side_effect": FileNotFoundError})
    alive = subprocess.Popen(["sleep", "100"])
    server._processes = {gone, psutil.Process(alive.pid)}
    server.owns_ray = True
    monkeypatch.setattr(server, "is_alive", lambda: True)  # it would note this process's own Ray
    monkeypatch.setattr("tandem.server.END_TIMEOUT_S", 0.1)
    monkeypatch.setattr("tandem.server.ray", Mock())
    monkeypatch.setattr("tandem.server.signals", Mock())
    server.stop()
    assert alive.wait() == -signal.SIGKILL


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: tandem ")
    for name in ("serve", "plan", "chaos", "bench", "demo-train"):
        assert f"\n    {name} " in said


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"tandem (\d+\.\d+\.\d+|unknown)\n", capsys.readouterr().out)


class CompilingServer:
    """Compiles for as many looks as it is told, and lives for a few more."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks
        self.num_lives = num_looks + 3

    def is_compiling(self) -> bool:
        self.num_left -= 1
        return self.num_left >= 0

    def is_alive(self) -> bool:
        self.num_lives -= 1
        return self.num_lives >= 0


@pytest.mark.parametrize(
    ("num_looks", "words"), [(3, ["compiling kernels", "kernels are compiled"]), (0, [])]
)
def test_one_line_says_when_kernels_are_compiled(
    num_looks: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.serve.WATCH_S", 0)
    said = io.StringIO()
    server: Any = CompilingServer(num_looks)
    _watch(server, Console(said))
    lines = said.getvalue().splitlines()
    assert len(lines) == len(words)
    assert all(line.startswith(word) for line, word in zip(lines, words, strict=True))
