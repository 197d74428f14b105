"""The token bucket: so many per second on average, and a bounded number at once. Pure.

A bucket of capacity c that fills by r per second lets at most c + r t through in any t seconds.
More than it holds may be taken, where a request needs more than a full one; then it is in debt.
"""


class TokenBucket:
    """All times are seconds on one clock, which the caller reads."""

    def __init__(self, *, rate: float, capacity: float, now: float) -> None:
        """Make a bucket that is full, and fills by `rate` per second."""
        self.rate = rate
        self.capacity = capacity
        self._level = capacity
        self._level_at = now

    def level(self, now: float) -> float:
        """What may be taken now; below 0 it is in debt."""
        return min(self.capacity, self._level + (now - self._level_at) * self.rate)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much is there; of more than it can hold, until it is full."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self.rate)

    def full_in_s(self, now: float) -> float:
        """Seconds until it is full."""
        return self.wait_s(self.capacity, now)

    def take(self, amount: float, now: float) -> None:
        """Take so much, whether it is there or not."""
        self._level = self.level(now) - amount
        self._level_at = now

    def put_back(self, amount: float, now: float) -> None:
        """Give back what was taken and not used."""
        self._level = min(self.capacity, self.level(now) + amount)
        self._level_at = now
