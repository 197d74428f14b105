"""Every metric: name, help text, and where it is counted. Rates are derived in PromQL.

Ray exports them on each node's metrics port, counters as `ray_<name>_total`.

Tokens are counted as far as they stand in a text: a round's drafts behind a stop are not, and a
text's last token counts as the target's own. So a round's tokens are its accepted drafts and one.

  acceptance rate alpha   rate(num_accepted_tokens) / rate(num_tested_tokens)
  draft efficiency        rate(num_accepted_tokens) / rate(num_draft_tokens)
  tokens per verify tau   1 + rate(num_accepted_tokens) / rate(num_drafts)
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.router.round import RoundRecord

ROUND_BUCKETS_S = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
NUM_REMEMBERED_ROUNDS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatistics:
    """The last rounds of a router that carried drafts or single tokens; medians in seconds."""

    num_rounds: int
    num_committed: int
    num_draft_tokens: int
    num_tested: int
    num_accepted: int
    num_drafts: int
    draft_s: float
    draft_compute_s: float
    verify_s: float
    verify_compute_s: float
    outside_s: float
    router_s: float
    total_s: float
    gammas: tuple[float, ...]
    """The mean draft length of each round's sequences, in their order."""


class RouterMetrics:
    """Counts rounds for Prometheus, and remembers the last ones for the benchmark."""

    def __init__(self) -> None:
        self._num_drafts = Counter(
            "tandem_spec_decode_num_drafts",
            "Sequences verified with at least one draft token, counted per round.",
        )
        self._num_draft_tokens = Counter(
            "tandem_spec_decode_num_draft_tokens", "Draft tokens sent to verification."
        )
        self._num_tested_tokens = Counter(
            "tandem_spec_decode_num_tested_tokens",
            "Draft tokens compared with the target's own: the accepted ones and the first rejected "
            "of each draft. alpha = rate(accepted) / rate(tested).",
        )
        self._num_accepted_tokens = Counter(
            "tandem_spec_decode_num_accepted_tokens", "Draft tokens the target agreed with."
        )
        self._num_accepted_per_position = Counter(
            "tandem_spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft, from 0.",
            tag_keys=("position",),
        )
        self._num_generated_tokens = Counter(
            "tandem_num_generated_tokens", "Tokens committed to completions."
        )
        self._gamma = Gauge(
            "tandem_gamma",
            "Mean draft length of the sequences in the last round with drafts; 0 at rest.",
        )
        self._num_decisions = Counter(
            "tandem_gamma_decisions",
            "Rounds by why they drafted as far as they did.",
            tag_keys=("reason",),
        )
        self._num_live_sequences = Gauge(
            "tandem_num_live_sequences", "Completions running in this router."
        )
        self._phase_s = Histogram(
            "tandem_round_phase_seconds",
            "Time of a round by phase: draft, verify, and the router's own.",
            boundaries=ROUND_BUCKETS_S,
            tag_keys=("phase",),
        )
        self._records: deque[RoundRecord] = deque(maxlen=NUM_REMEMBERED_ROUNDS)

    def observe_round(self, record: RoundRecord) -> None:
        self._records.append(record)
        self._num_decisions.inc(tags={"reason": record.reason.value})
        if record.num_committed:
            self._num_generated_tokens.inc(record.num_committed)
        for phase, seconds in (
            ("draft", record.draft_s),
            ("verify", record.verify_s),
            ("router", record.router_s),
        ):
            self._phase_s.observe(seconds, tags={"phase": phase})
        if record.outcomes:
            self._observe_drafts(record)

    def observe_live(self, num_live: int) -> None:
        self._num_live_sequences.set(num_live)
        if num_live == 0:
            self._gamma.set(0)

    def _observe_drafts(self, record: RoundRecord) -> None:
        num_draft_tokens = sum(outcome.num_draft_tokens for outcome in record.outcomes)
        self._num_drafts.inc(len(record.outcomes))
        self._num_draft_tokens.inc(num_draft_tokens)
        num_tested = sum(outcome.num_tested_in_text for outcome in record.outcomes)
        if num_tested:  # none of a round whose clients had left
            self._num_tested_tokens.inc(num_tested)
        self._gamma.set(num_draft_tokens / len(record.outcomes))
        most_accepted = max(outcome.num_accepted_in_text for outcome in record.outcomes)
        for position in range(most_accepted):
            count = sum(outcome.num_accepted_in_text > position for outcome in record.outcomes)
            self._num_accepted_tokens.inc(count)
            self._num_accepted_per_position.inc(count, tags={"position": str(position)})

    def take_statistics(self) -> RoundStatistics:
        """Of the rounds since the last call, at most the remembered ones; prefills left out."""
        records = [record for record in self._records if not record.is_prefill]
        self._records.clear()
        outcomes = [outcome for record in records for outcome in record.outcomes]

        def typical(values: list[float]) -> float:
            return median(values) if values else 0.0

        return RoundStatistics(
            num_rounds=len(records),
            num_committed=sum(record.num_committed for record in records),
            num_drafts=len(outcomes),
            num_draft_tokens=sum(outcome.num_draft_tokens for outcome in outcomes),
            num_tested=sum(outcome.num_tested_in_text for outcome in outcomes),
            num_accepted=sum(outcome.num_accepted_in_text for outcome in outcomes),
            draft_s=typical([record.draft_s for record in records]),
            draft_compute_s=typical([record.draft_compute_s for record in records]),
            verify_s=typical([record.verify_s for record in records]),
            verify_compute_s=typical([record.verify_compute_s for record in records]),
            outside_s=typical([record.outside_s for record in records]),
            router_s=typical([record.router_s for record in records]),
            total_s=typical([record.total_s for record in records]),
            gammas=tuple(
                sum(outcome.num_draft_tokens for outcome in record.outcomes) / record.num_sequences
                for record in records
            ),
        )


class WorkerMetrics:
    """What a target or draft replica holds."""

    def __init__(self, role: str) -> None:
        self._num_sequences = Gauge(
            "tandem_num_cached_sequences", "Sequences with soft state here.", tag_keys=("role",)
        )
        self._num_used_blocks = Gauge(
            "tandem_kv_cache_used_blocks", "KV blocks in use.", tag_keys=("role",)
        )
        self._num_prompt_tokens = Counter(
            "tandem_prefix_cache_num_prompt_tokens",
            "Tokens of new sequences, looked up in the prefix cache.",
            tag_keys=("role",),
        )
        self._num_prefix_tokens = Counter(
            "tandem_prefix_cache_num_hit_tokens",
            "Of those, the tokens found there, which are not run again.",
            tag_keys=("role",),
        )
        self._num_preemptions = Counter(
            "tandem_num_preemptions",
            "Sequences that lost their cache to others, for lack of blocks, and are run again.",
            tag_keys=("role",),
        )
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
        """The last three are counts since the start."""
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
