"""Calls that go where a sequence's cache is, and new sequences to where there is room.

A caller names a replica by its unique id, as the session id of a handle. While that replica lives
it gets the call; when it is gone, or none was named, the one that caches least is chosen, and will
answer that it needs the sequence's tokens. Calls without sequences go to any.

`RequestRouter` is an alpha interface of Ray 2.60.
"""

import random
from collections.abc import Mapping
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from workers.types import ProposeRequest, VerifyRequest

REPORT_PERIOD_S = 1.0
NUM_CACHED_TOKENS = "num_cached_tokens"
"""What replicas report to routers."""


class ReplicaLoads:
    """How much each replica caches: what it last said, and what was sent there since."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}
        self._sent: dict[str, int] = {}

    def choose(self, reported: Mapping[str, float], num_tokens: int, *, rng: random.Random) -> str:
        """The replica with the least, which is sent `num_tokens` now; any of equals.

        Args:
            reported: tokens cached, of every replica there is.
        """
        for name, load in reported.items():
            if load != self._reported.get(name):
                self._sent[name] = 0
        self._reported = dict(reported)
        self._sent = {name: self._sent.get(name, 0) for name in reported}
        loads = {name: load + self._sent[name] for name, load in reported.items()}
        least = min(loads.values())
        chosen = rng.choice([name for name, load in loads.items() if load == least])
        self._sent[chosen] += num_tokens
        return chosen


class PinnedReplicaRouter(RequestRouter):
    """Routes to the replica whose unique id is the session id, else to where least is cached."""

    _loads: ReplicaLoads | None = None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve sends to the least busy of the inner list, and asks again after a pause if it is
        full or gone."""
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not candidates:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        num_tokens = _num_tokens(pending_request.args)
        if wanted not in candidates and num_tokens == 0:
            wanted = random.choice(list(candidates))
        elif wanted not in candidates:
            self._loads = self._loads or ReplicaLoads()
            reported = {
                name: replica.routing_stats.get(NUM_CACHED_TOKENS, 0)
                for name, replica in candidates.items()
            }
            wanted = self._loads.choose(reported, num_tokens, rng=random.Random())
        return [[candidates[wanted]]]


def _num_tokens(arguments: list[Any]) -> int:
    """How many tokens the sequences of a call bring, which their replica has to run."""
    batch = arguments[0] if arguments and isinstance(arguments[0], list) else []
    return sum(
        len(request.new_tokens)
        for request in batch
        if isinstance(request, VerifyRequest | ProposeRequest)
    )


PINNED = RequestRouterConfig(
    request_router_class=f"{__name__}.{PinnedReplicaRouter.__name__}",  # type: ignore[arg-type]
    request_routing_stats_period_s=REPORT_PERIOD_S,  # type: ignore[arg-type]
)
