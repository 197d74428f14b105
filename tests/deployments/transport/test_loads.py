"""Where a new sequence goes: to the replica that caches least."""

import random

from deployments.transport.loads import ReplicaLoads


def test_the_replica_that_reports_least_is_chosen() -> None:
    loads = ReplicaLoads()
    reported = {"a": 300, "b": 100, "c": 200}
    assert loads.choose(reported, 10, rng=random.Random(0)) == "b"


def test_what_was_sent_since_the_report_counts() -> None:
    loads, rng = ReplicaLoads(), random.Random(0)
    reported = {"a": 300, "b": 100}
    chosen = [loads.choose(reported, 90, rng=rng) for _ in range(5)]
    assert chosen == ["b", "b", "b", "a", "b"]


def test_a_new_report_replaces_what_was_sent() -> None:
    loads, rng = ReplicaLoads(), random.Random(0)
    assert loads.choose({"a": 300, "b": 100}, 500, rng=rng) == "b"
    assert loads.choose({"a": 300, "b": 100}, 500, rng=rng) == "a"
    # b has said how much of it there is now; of a nothing new is known
    assert loads.choose({"a": 300, "b": 250}, 500, rng=rng) == "b"
    assert loads.choose({"a": 300, "b": 250}, 500, rng=rng) == "b"
    assert loads.choose({"a": 300, "b": 250}, 500, rng=rng) == "a"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    loads, rng = ReplicaLoads(), random.Random(0)
    loads.choose({"a": 0, "b": 1}, 100, rng=rng)
    loads.choose({"b": 1}, 100, rng=rng)
    # a name that comes back is another replica
    assert loads.choose({"a": 0, "b": 1}, 100, rng=rng) == "a"


def test_equals_share_what_comes() -> None:
    loads, rng = ReplicaLoads(), random.Random(0)
    chosen = [loads.choose({"a": 0, "b": 0, "c": 0}, 10, rng=rng) for _ in range(9)]
    assert sorted(chosen) == sorted("abc" * 3)
