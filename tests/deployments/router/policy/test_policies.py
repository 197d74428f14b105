"""The pure decisions: gamma and admission."""

import pytest

from deployments.router.admission import Admission, AdmissionLimits
from deployments.router.policy.gamma import Candidate, FixedGamma
from workers.errors import InvalidRequestError, OverloadedError


def test_fixed_gamma_gives_what_is_allowed() -> None:
    candidates = [Candidate(seq_id=str(n), max_gamma=n) for n in (0, 2, 4, 8)]
    assert FixedGamma(4).choose(candidates, num_prefill_tokens=0).gammas == [0, 2, 4, 4]
    assert FixedGamma(0).choose(candidates, num_prefill_tokens=0).gammas == [0, 0, 0, 0]


LIMITS = AdmissionLimits(max_running=4, max_waiting=2)


@pytest.mark.parametrize(("num_unfinished", "num_new"), [(0, 6), (5, 1), (4, 2)])
def test_what_fits_is_admitted(num_unfinished: int, num_new: int) -> None:
    admission = Admission(LIMITS)
    with admission.reserve(num_unfinished) as before, admission.reserve(num_new) as reservation:
        assert admission.num_unfinished == num_unfinished + num_new
        reservation.release_one()
        before.release_one()
        assert admission.num_unfinished == num_unfinished + num_new - 2 + (num_unfinished == 0)
    assert admission.num_unfinished == 0
    reservation.release_one()  # of a request that has ended
    assert admission.num_unfinished == 0


@pytest.mark.parametrize(("num_unfinished", "num_new"), [(1, 6), (6, 1), (4, 3)])
def test_what_does_not_fit_is_refused_as_a_whole(num_unfinished: int, num_new: int) -> None:
    admission = Admission(LIMITS)
    admission.reserve(num_unfinished)
    with pytest.raises(OverloadedError, match="at most 4 run and 2 wait") as caught:
        admission.reserve(num_new)
    assert caught.value.retry_after_s > 0
    assert admission.num_unfinished == num_unfinished


def test_what_can_never_fit_is_a_wrong_request() -> None:
    with pytest.raises(InvalidRequestError, match=r"7 completions.* at most 6 fit"):
        Admission(LIMITS).reserve(7)
