"""How long a worker waits for those it has just answered. Pure.

A caller is back with its next question once it has committed the answer and fetched drafts. If a
step of long prompts began meanwhile, it would wait for all of that step, and so every other step
would run without it; yet in that step its few tokens would cost little.
"""

MOST_SHARE = 0.5
"""Of the last step's time: who takes longer to come back is not waited for."""
PATIENCE = 2.0
"""Times the usual return that are waited at most."""
RATE = 0.2
"""The weight of the newest return among all."""


class Linger:
    """Learns how soon callers come back. All times are in seconds."""

    def __init__(self) -> None:
        self._usual_s: float | None = None

    def observe(self, return_s: float) -> None:
        """A caller was back so long after its answer, or was waited for in vain."""
        before_s = return_s if self._usual_s is None else self._usual_s
        self._usual_s = before_s + RATE * (return_s - before_s)

    def limit_s(self, *, last_step_s: float) -> float:
        """How long to wait for callers before a step that could go on without them."""
        if self._usual_s is None or self._usual_s > MOST_SHARE * last_step_s:
            return 0.0
        return PATIENCE * self._usual_s
