"""Which replica gets a new sequence: the one that caches least."""

import random
from collections.abc import Mapping


class ReplicaLoads:
    """How much each replica caches: what it last said, and what was sent there since."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}
        self._sent: dict[str, int] = {}

    def choose(self, reported: Mapping[str, float], num_tokens: int, *, rng: random.Random) -> str:
        """The replica with the least, which is sent `num_tokens` now; any of equals.

        Args:
            reported: tokens cached, of every replica that may be chosen; at least one.
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
