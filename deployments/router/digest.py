"""What rounds teach the policies and tell the metrics, while workers are busy with the next one."""

import logging
from collections.abc import Callable

from deployments.router.policy.gamma import ObservedRound
from deployments.router.round import RoundObserver, RoundRecord

logger = logging.getLogger(__name__)


class Digest:
    """Keeps records until there is time. No sequence may hang on that: errors are logged."""

    def __init__(self, learn: Callable[[ObservedRound], None], observer: RoundObserver) -> None:
        self._learn = learn
        self._observer = observer
        self._records: list[RoundRecord] = []

    def add(self, record: RoundRecord) -> None:
        """Keep what a round did."""
        self._records.append(record)

    def run(self) -> None:
        """Learn from all rounds that were kept."""
        records, self._records = self._records, []
        for record in records:
            try:
                self._learn(record)
                self._observer.observe_round(record)
            except Exception:  # a defect of ours
                logger.exception("a round is not recorded")

    def observe_live(self, num_live: int) -> None:
        """Tell how many sequences there are now."""
        try:
            self._observer.observe_live(num_live)
        except Exception:  # a defect of ours
            logger.exception("the number of sequences is not recorded")
