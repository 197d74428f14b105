"""How many replicas of a worker there are, where Serve may choose: by the sequences they hold.

Serve by itself counts the calls of its handles, and rounds travel over streams. So replicas tell it
how many sequences they hold, and it compares that with what one of them is to hold. Serve's own
bounds, delays and averages apply.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.replica_range import ReplicaRange

NUM_SEQUENCES = "num_sequences"
"""What replicas report, by Serve's `record_autoscaling_stats`."""
SEQUENCES_PER_REPLICA = 16
"""How many a replica is to hold. A config file may say otherwise, as `target_ongoing_requests`."""


def scaling_options(replicas: ReplicaRange) -> dict[str, Any]:
    """The options of a worker's deployment that ask Serve for so many replicas."""
    options = replicas.serve_options()
    if not replicas.is_fixed:
        options["autoscaling_config"] |= {
            "target_ongoing_requests": SEQUENCES_PER_REPLICA,
            "policy": {"policy_function": f"{__name__}:wanted_replicas"},
        }
    return options


def wanted_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number that would hold what is held now, and no state; called by Serve's controller.

    It stays as it is until a replica has reported.
    """
    reported = (context.aggregated_metrics or {}).get(NUM_SEQUENCES)
    if not reported or context.config is None:
        return context.target_num_replicas, {}
    return sum(reported.values()) / context.config.get_target_ongoing_requests(), {}
