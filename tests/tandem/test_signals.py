"""Signals as one exception."""

import signal

import pytest

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
