"""How long a worker waits for those it has just answered.

A caller is back with its next question once it has committed the answer and fetched drafts. If a
step of long prompts began meanwhile, it would wait for all of that step, and so every other step
would run without it; yet in that step its few tokens would cost little.
"""

MOST_SHARE = 0.5
"""Wait for returning callers only if they usually return within this share of the last step."""
PATIENCE = 2.0
"""The longest wait, as a multiple of the usual return."""
RATE = 0.2
"""The weight of the newest return in the moving average."""


class RejoinWait:
    """Learns how soon callers come back. All times are in seconds."""

    def __init__(self) -> None:
        self._usual_s: float | None = None

    def observe(self, return_s: float) -> None:
        """Learn from a caller that was back so long after its answer, or did not come so long."""
        before_s = return_s if self._usual_s is None else self._usual_s
        self._usual_s = before_s + RATE * (return_s - before_s)

    def limit_s(self, *, last_step_s: float) -> float:
        """How long to wait for callers before a step that could go on without them."""
        if self._usual_s is None or self._usual_s > MOST_SHARE * last_step_s:
            return 0.0
        return PATIENCE * self._usual_s
