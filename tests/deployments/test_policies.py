"""The pure decisions: gamma and admission."""

import pytest

from deployments.router.admission import AdmissionLimits, check_admission
from deployments.router.gamma import Candidate, FixedGamma
from workers.errors import OverloadedError


def test_fixed_gamma_gives_what_is_allowed() -> None:
    candidates = [Candidate(seq_id=str(n), max_gamma=n) for n in (0, 2, 4, 8)]
    assert FixedGamma(4).choose(candidates, num_beside=0).gammas == [0, 2, 4, 4]
    assert FixedGamma(0).choose(candidates, num_beside=0).gammas == [0, 0, 0, 0]


LIMITS = AdmissionLimits(max_running=4, max_waiting=2)


@pytest.mark.parametrize(("num_unfinished", "num_new"), [(0, 6), (5, 1), (6, 0)])
def test_what_fits_is_admitted(num_unfinished: int, num_new: int) -> None:
    check_admission(LIMITS, num_unfinished=num_unfinished, num_new=num_new)


@pytest.mark.parametrize(("num_unfinished", "num_new"), [(0, 7), (6, 1), (4, 3)])
def test_what_does_not_fit_is_refused_as_a_whole(num_unfinished: int, num_new: int) -> None:
    with pytest.raises(OverloadedError, match="at most 4 run and 2 wait") as caught:
        check_admission(LIMITS, num_unfinished=num_unfinished, num_new=num_new)
    assert caught.value.retry_after_s > 0
