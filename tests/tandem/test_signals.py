"""Signals as one exception."""

import signal
from typing import Any

import pytest

from tandem.__main__ import main
from tandem.signals import Stopped, stopped_by_signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_block_with_its_status(number: signal.Signals, status: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, stopped_by_signals():
        signal.raise_signal(number)
    assert caught.value.status == status
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (SystemExit(15), 143)], ids=repr
)
def test_what_rays_own_handlers_raise_is_the_same(error: BaseException, status: int) -> None:
    with pytest.raises(Stopped) as caught, stopped_by_signals():
        raise error
    assert caught.value.status == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_ends_what_it_has_started(
    number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def add_plan(commands: Any) -> None:
        def run(_: object) -> None:
            try:
                signal.raise_signal(number)
            finally:
                ended.append("the app")

        commands.add_parser("plan").set_defaults(run=run)

    monkeypatch.setattr("tandem.commands.add_plan", add_plan)
    assert main(["plan"]) == status
    assert ended == ["the app"]
