"""The table of metrics, and what rounds and workers count by it."""

from collections import Counter
from typing import Any

import pytest

from deployments import metrics
from deployments.metrics import Kind, RouterMetrics, WorkerMetrics, rows
from deployments.router.policy.gamma import Outcome, Reason
from deployments.router.round import RoundRecord, RoundTimes


class Recorded:
    """Stands in for Ray's metrics, whose values cannot be read in the process that sets them."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.values: Counter[tuple[str, str]] = Counter()

    def instrument(self, kind: str) -> Any:
        def make(name: str, description: str, tag_keys: tuple[str] | None, **_: Any) -> Any:
            row = metrics.METRICS[name]
            assert (row.kind, row.meaning) == (kind, description)
            self.made.append(name)
            return Instrument(self, name, tag_keys or ())

        return make


class Instrument:
    def __init__(self, recorded: Recorded, name: str, labels: tuple[str, ...]) -> None:
        self._values = recorded.values
        self._name = name
        self._labels = labels

    def _key(self, tags: dict[str, str] | None) -> tuple[str, str]:
        assert tuple(tags or ()) == self._labels
        return self._name, "".join((tags or {}).values())

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        assert value > 0, "Ray refuses others"
        self._values[self._key(tags)] += value

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self._values[self._key(tags)] = value

    observe = inc


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    for kind in Kind:
        monkeypatch.setattr(metrics, kind.capitalize(), recorded.instrument(kind))
    return recorded


def test_every_row_of_the_table_is_a_metric_and_no_other_is(recorded: Recorded) -> None:
    RouterMetrics()
    WorkerMetrics("target")
    assert sorted(recorded.made) == sorted(row.name for row in rows())


def outcome(num_draft_tokens: int, num_accepted: int, num_committed: int, source: str) -> Outcome:
    return Outcome(
        seq_id="s",
        num_draft_tokens=num_draft_tokens,
        num_tested=min(num_accepted + 1, num_draft_tokens),
        num_accepted=num_accepted,
        num_committed=num_committed,
        source=source,
    )


def test_tokens_are_counted_as_far_as_they_stand_in_a_text(recorded: Recorded) -> None:
    outcomes = (
        outcome(4, 3, 4, "model"),
        outcome(2, 2, 1, "prompt_lookup"),  # this text ended with its first token
    )
    record = RoundRecord(
        outcomes=outcomes,
        reason=Reason.BEST,
        num_sequences=3,
        num_drafted=2,
        longest_draft=4,
        num_tokens=9,
        num_committed=6,
        draft_s=None,
        draft_compute_s=0.125,
        draft_further_s=0.0,
        verify_s=0.5,
        verify_compute_s=0.375,
        router_s=0.25,
        round_s=1.0,
        is_prefill=False,
        times=RoundTimes(draft_s=0.25, verify_s=0.5, total_s=1.0),
    )
    RouterMetrics().observe_round(record)
    values = {
        name.removeprefix("tandem_") + label: value
        for (name, label), value in recorded.values.items()
    }
    assert values == {
        "spec_decode_num_draftsmodel": 1,
        "spec_decode_num_draftsprompt_lookup": 1,
        "spec_decode_num_draft_tokensmodel": 4,
        "spec_decode_num_draft_tokensprompt_lookup": 2,
        "spec_decode_num_tested_tokensmodel": 4,
        "spec_decode_num_tested_tokensprompt_lookup": 1,
        "spec_decode_num_accepted_tokensmodel": 3,
        "spec_decode_num_accepted_tokens_per_pos0": 1,
        "spec_decode_num_accepted_tokens_per_pos1": 1,
        "spec_decode_num_accepted_tokens_per_pos2": 1,
        "num_generated_tokens": 6,
        "gamma": 3,
        "gamma_decisionsbest": 1,
        "round_phase_secondsdraft": 0.25,
        "round_phase_secondsverify": 0.5,
        "round_phase_secondsrouter": 0.25,
        "round_compute_secondsdraft": 0.125,
        "round_compute_secondsverify": 0.375,
    }


def test_gauges_are_at_rest_once_nobody_runs(recorded: Recorded) -> None:
    router = RouterMetrics()
    router.observe_live(2)
    assert recorded.values["tandem_num_live_sequences", ""] == 2
    router._gamma.set(3)
    router.observe_live(0)
    assert recorded.values["tandem_num_live_sequences", ""] == 0
    assert recorded.values["tandem_gamma", ""] == 0


def test_a_workers_counts_since_its_start_become_increments(recorded: Recorded) -> None:
    worker = WorkerMetrics("draft")
    for total in (3, 3, 8):
        worker.observe(
            num_sequences=1,
            num_used_blocks=2,
            num_prompt_tokens=total,
            num_prefix_tokens=0,
            num_preemptions=0,
        )
    assert recorded.values["tandem_prefix_cache_num_prompt_tokens", "draft"] == 8
    assert recorded.values["tandem_kv_cache_used_blocks", "draft"] == 2
