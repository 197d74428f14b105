"""One sentence out of what Serve says of a start that failed."""

from tandem.failures import find_failure

TRACEBACK = """A replica failed to start with exception. Retrying 2 more time(s). Error:
ray::ServeReplica:default:TargetGroup.initialize_and_get_metadata() (pid=578, ip=127.0.0.1)
  File "target_group.py", line 51, in __init__
    check_target(args)
{error}
"""
SENTENCE = "max_model_len is 9, but 'x' has positions for 8 tokens only; use at most that"


def test_what_no_other_try_would_change_is_final() -> None:
    message = TRACEBACK.format(error=f"workers.errors.UnsupportedModelError: {SENTENCE}")
    failure = find_failure(["", message, "Failed to update the deployments ['TargetGroup']."])
    assert failure is not None
    assert failure.sentence == SENTENCE
    assert failure.is_final


def test_other_errors_may_be_tried_again() -> None:
    error = "RuntimeError: [enforce fail at alloc_cpu.cpp:114] out of memory"
    failure = find_failure([TRACEBACK.format(error=error)])
    assert failure is not None
    assert failure.sentence == error
    assert not failure.is_final


def test_a_lost_rank_may_come_at_another_try() -> None:
    error = "workers.errors.WorkerLostError: rank 1 is lost"
    failure = find_failure([TRACEBACK.format(error=error)])
    assert failure is not None
    assert not failure.is_final


def test_while_all_goes_well_there_is_none() -> None:
    assert find_failure(["", "Waiting for 1 replica to start."]) is None
