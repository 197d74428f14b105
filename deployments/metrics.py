"""Every metric: name, kind, label and meaning in one table, and where it is counted.

Ray exports them on each node's metrics port, counters as `ray_<name>_total`. Rates are derived in
PromQL, from differences of the counters.

What becomes of drafts is counted per drafter: `source` is the drafter's name:
one of the option `drafter`, `predicted` or `grammar`.
Tokens are counted as far as they stand in a text: a round's drafts behind a stop are not, and a
text's last token counts as the target's own. So a round's tokens are its accepted drafts and one.

  acceptance rate alpha   rate(num_accepted_tokens) / rate(num_tested_tokens)
  draft efficiency        rate(num_accepted_tokens) / rate(num_draft_tokens)
  tokens per verify tau   1 + rate(num_accepted_tokens) / rate(num_drafts)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.router.policy.gamma import Outcome
from deployments.router.round import RoundRecord

ROUND_BUCKETS_S = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table of metrics."""

    name: str
    kind: Kind
    meaning: str
    label: str | None = None
    """The name of its only label; None if it has none."""

    @property
    def tag_keys(self) -> tuple[str] | None:
        return None if self.label is None else (self.label,)


_ROWS = (
    Metric(
        name="tandem_spec_decode_num_drafts",
        kind=Kind.COUNTER,
        meaning="Sequences verified with at least one draft token, counted per round.",
        label="source",
    ),
    Metric(
        name="tandem_spec_decode_num_draft_tokens",
        kind=Kind.COUNTER,
        meaning="Draft tokens sent to verification.",
        label="source",
    ),
    Metric(
        name="tandem_spec_decode_num_tested_tokens",
        kind=Kind.COUNTER,
        meaning="Draft tokens compared with the target's own: the accepted ones and the first "
        "rejected of each draft. alpha = rate(accepted) / rate(tested).",
        label="source",
    ),
    Metric(
        name="tandem_spec_decode_num_accepted_tokens",
        kind=Kind.COUNTER,
        meaning="Draft tokens the target agreed with.",
        label="source",
    ),
    Metric(
        name="tandem_spec_decode_num_accepted_tokens_per_pos",
        kind=Kind.COUNTER,
        meaning="Accepted draft tokens by their position in the draft, from 0.",
        label="position",
    ),
    Metric(
        name="tandem_num_generated_tokens",
        kind=Kind.COUNTER,
        meaning="Tokens committed to completions.",
    ),
    Metric(
        name="tandem_gamma",
        kind=Kind.GAUGE,
        meaning="Mean draft length of the sequences in the last round with drafts; 0 at rest.",
    ),
    Metric(
        name="tandem_gamma_decisions",
        kind=Kind.COUNTER,
        meaning="Rounds by why they drafted as far as they did.",
        label="reason",
    ),
    Metric(
        name="tandem_num_live_sequences",
        kind=Kind.GAUGE,
        meaning="Completions running in this router.",
    ),
    Metric(
        name="tandem_round_phase_seconds",
        kind=Kind.HISTOGRAM,
        meaning="Time of a round by phase: draft, verify, and the router's own.",
        label="phase",
    ),
    Metric(
        name="tandem_round_compute_seconds",
        kind=Kind.HISTOGRAM,
        meaning="The part of a round's draft and verify phases that a worker spent in steps; the "
        "rest are hops and waits.",
        label="phase",
    ),
    Metric(
        name="tandem_num_cached_sequences",
        kind=Kind.GAUGE,
        meaning="Sequences with soft state in a worker.",
        label="role",
    ),
    Metric(
        name="tandem_kv_cache_used_blocks",
        kind=Kind.GAUGE,
        meaning="KV blocks in use.",
        label="role",
    ),
    Metric(
        name="tandem_prefix_cache_num_prompt_tokens",
        kind=Kind.COUNTER,
        meaning="Tokens of new sequences, looked up in the prefix cache.",
        label="role",
    ),
    Metric(
        name="tandem_prefix_cache_num_hit_tokens",
        kind=Kind.COUNTER,
        meaning="Tokens of new sequences that the prefix cache had, which are not run again.",
        label="role",
    ),
    Metric(
        name="tandem_num_preemptions",
        kind=Kind.COUNTER,
        meaning="Sequences that lost their cache to others, for lack of blocks, and are run again.",
        label="role",
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ROWS}


def rows() -> tuple[Metric, ...]:
    """The table of all metrics."""
    return _ROWS


def _counter(name: str) -> Counter:
    metric = METRICS[name]
    assert metric.kind is Kind.COUNTER
    return Counter(name, metric.meaning, tag_keys=metric.tag_keys)


def _gauge(name: str) -> Gauge:
    metric = METRICS[name]
    assert metric.kind is Kind.GAUGE
    return Gauge(name, metric.meaning, tag_keys=metric.tag_keys)


def _histogram(name: str) -> Histogram:
    metric = METRICS[name]
    assert metric.kind is Kind.HISTOGRAM
    return Histogram(name, metric.meaning, boundaries=ROUND_BUCKETS_S, tag_keys=metric.tag_keys)


class RouterMetrics:
    """Counts a router's rounds."""

    def __init__(self) -> None:
        self._num_drafts = _counter("tandem_spec_decode_num_drafts")
        self._num_draft_tokens = _counter("tandem_spec_decode_num_draft_tokens")
        self._num_tested_tokens = _counter("tandem_spec_decode_num_tested_tokens")
        self._num_accepted_tokens = _counter("tandem_spec_decode_num_accepted_tokens")
        self._num_accepted_per_position = _counter("tandem_spec_decode_num_accepted_tokens_per_pos")
        self._num_generated_tokens = _counter("tandem_num_generated_tokens")
        self._gamma = _gauge("tandem_gamma")
        self._num_decisions = _counter("tandem_gamma_decisions")
        self._num_live_sequences = _gauge("tandem_num_live_sequences")
        self._phase_s = _histogram("tandem_round_phase_seconds")
        self._compute_s = _histogram("tandem_round_compute_seconds")

    def observe_round(self, record: RoundRecord) -> None:
        self._num_decisions.inc(tags={"reason": record.reason.value})
        if record.num_committed:
            self._num_generated_tokens.inc(record.num_committed)
        for phase, seconds in (
            ("draft", record.times.draft_s),
            ("verify", record.times.verify_s),
            ("router", record.times.router_s),
        ):
            self._phase_s.observe(seconds, tags={"phase": phase})
        for phase, seconds in (
            ("draft", record.draft_compute_s),
            ("verify", record.verify_compute_s),
        ):
            self._compute_s.observe(seconds, tags={"phase": phase})
        if record.outcomes:
            self._observe_drafts(record)

    def observe_live(self, num_live: int) -> None:
        """The router has so many sequences now."""
        self._num_live_sequences.set(num_live)
        if num_live == 0:
            self._gamma.set(0)

    def _observe_drafts(self, record: RoundRecord) -> None:
        num_draft_tokens = sum(outcome.num_draft_tokens for outcome in record.outcomes)
        self._gamma.set(num_draft_tokens / len(record.outcomes))
        for source in sorted({outcome.source for outcome in record.outcomes}):
            self._count_drafts(source, [o for o in record.outcomes if o.source == source])
        for position in range(max(outcome.num_accepted_in_text for outcome in record.outcomes)):
            count = sum(outcome.num_accepted_in_text > position for outcome in record.outcomes)
            self._num_accepted_per_position.inc(count, tags={"position": str(position)})

    def _count_drafts(self, source: str, outcomes: Sequence[Outcome]) -> None:
        tags = {"source": source}
        self._num_drafts.inc(len(outcomes), tags=tags)
        self._num_draft_tokens.inc(sum(o.num_draft_tokens for o in outcomes), tags=tags)
        # none may be tested in a round whose clients had left, and none accepted
        if num_tested := sum(outcome.num_tested_in_text for outcome in outcomes):
            self._num_tested_tokens.inc(num_tested, tags=tags)
        if num_accepted := sum(outcome.num_accepted_in_text for outcome in outcomes):
            self._num_accepted_tokens.inc(num_accepted, tags=tags)


class WorkerMetrics:
    """Counts of a target or draft replica."""

    def __init__(self, role: str) -> None:
        self._num_sequences = _gauge("tandem_num_cached_sequences")
        self._num_used_blocks = _gauge("tandem_kv_cache_used_blocks")
        self._num_prompt_tokens = _counter("tandem_prefix_cache_num_prompt_tokens")
        self._num_prefix_tokens = _counter("tandem_prefix_cache_num_hit_tokens")
        self._num_preemptions = _counter("tandem_num_preemptions")
        self._tags = {"role": role}
        self._counted: dict[Counter, int] = {}

    def observe(
        self,
        *,
        num_sequences: int,
        num_used_blocks: int,
        num_prompt_tokens: int,
        num_prefix_tokens: int,
        num_preemptions: int,
    ) -> None:
        """Report what the worker holds now; the last three are counts since it started."""
        self._count(self._num_prompt_tokens, num_prompt_tokens)
        self._count(self._num_prefix_tokens, num_prefix_tokens)
        self._count(self._num_preemptions, num_preemptions)
        self._num_sequences.set(num_sequences, tags=self._tags)
        self._num_used_blocks.set(num_used_blocks, tags=self._tags)

    def _count(self, counter: Counter, total: int) -> None:
        """Have the counter say `total`."""
        before = self._counted.get(counter, 0)
        self._counted[counter] = total
        if total > before:
            counter.inc(total - before, tags=self._tags)
