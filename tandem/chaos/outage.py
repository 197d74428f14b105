"""When Serve's proxy is away, as far as its clients can tell."""

from collections.abc import Iterator
from contextlib import contextmanager


class Outage:
    """The time from the moment at which a proxy may die until a later request is answered.

    All times are seconds of one clock.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._is_striking = False
        self._began_s: float | None = None
        self._ended_s: float | None = None

    @contextmanager
    def striking(self) -> Iterator[None]:
        """The block looks for a proxy and kills it."""
        self._is_striking = True
        try:
            yield
        finally:
            self._is_striking = False

    def begin(self, now_s: float) -> None:
        """The proxy is dead from now on."""
        self._began_s, self._ended_s = now_s, None

    def answered(self, *, sent_s: float, now_s: float) -> None:
        """A request was answered: there is a proxy if it was sent after the last one's death."""
        is_after = self._began_s is not None and sent_s > self._began_s
        if is_after and self._ended_s is None and not self._is_striking:
            self._ended_s = now_s

    def explains(self, *, sent_s: float, now_s: float) -> bool:
        """Whether a request that breaks off now may have done so for the lack of a proxy."""
        if self._is_striking:
            return True
        if self._began_s is None or now_s - self._began_s > self._longest_s:
            return False
        return self._ended_s is None or sent_s <= self._ended_s
