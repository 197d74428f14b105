"""Calls that go where a sequence's cache is.

A caller names a replica by its unique id, as the session id of a handle. While that replica lives
it gets the call; when it is gone, or none was named, another is chosen, and will answer that it
needs the sequence's tokens.

`RequestRouter` is an alpha interface of Ray 2.60.
"""

import random

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinnedReplicaRouter(RequestRouter):
    """Routes to the replica whose unique id is the session id, else to the less busy of two."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve sends to the least busy of the inner list, and asks again after a pause if it is
        full or gone."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            wanted = pending_request.metadata.session_id
            for replica in candidate_replicas:
                if replica.replica_id.unique_id == wanted:
                    return [[replica]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


PINNED = RequestRouterConfig(
    request_router_class=f"{__name__}.{PinnedReplicaRouter.__name__}"  # type: ignore[arg-type]
)
