"""The end of `tandem serve`. By its name it runs last: nothing is left then."""

import signal

import psutil

from tandem.live.server import leave_ray
from tests.integration.tandem_serve import END_TIMEOUT_S, TandemServe


def test_a_signal_ends_it_and_all_that_it_has_started(server: TandemServe) -> None:
    leave_ray()
    family = server.family()
    assert len(family) > 5
    said = server.stop()
    assert server.process.returncode == 128 + signal.SIGTERM
    assert "stopping" in said  # Ray may complain meanwhile, of workers that tests have killed
    assert not [line for line in said if "infinite retries" in line]
    _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    assert alive == []
