"""What is to be expected of drafts, learnt from what became of others of their kind. Pure.

Greedy and sampled drafts are two kinds: how sure a drafter is of a token means something else of
each, and so does how far its drafts go.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.router.policy.acceptance import AcceptanceEstimator
from deployments.router.policy.confidence import NUM_PATHS, Calibration, Paths
from deployments.router.policy.cost import Floats
from deployments.router.policy.gamma import Candidate, Drafted, Outcome

IDLE_OPTIMISM = 1.5
"""Standard deviations that drafting is given the benefit of while nothing is drafted, since nothing
is learnt then."""
IDLE_PATHS = 24
"""Of the last drafts, those that count while nothing is drafted."""
MOST_SAMPLES = 64
FEWEST_SAMPLES = 8
"""Foreseen drafts of a sequence: more only take time. With many sequences, each has others."""


@dataclass(slots=True)
class _Kind:
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    calibration: Calibration = field(default_factory=Calibration)
    paths: Paths = field(default_factory=Paths)

    def foresee(
        self, seq_ids: Sequence[str], depth: int, num_samples: int, *, is_idle: bool
    ) -> Floats:
        """Shapes: [sequences, samples, depth]; of silent drafters 1 sample."""
        optimism = IDLE_OPTIMISM if is_idle else 0.0
        if depth == 0 or not len(self.paths):
            rows = [self.acceptance.survival(i, depth, optimism=optimism) for i in seq_ids]
            return np.array(rows).reshape(len(seq_ids), 1, depth)
        betas = np.array([self.calibration.beta(i, optimism=optimism) for i in seq_ids])
        logs = self.paths.log_products(depth, newest=IDLE_PATHS if is_idle else NUM_PATHS)
        dealt = np.arange(len(seq_ids) * num_samples) % len(logs)
        samples = logs[dealt].reshape(len(seq_ids), num_samples, depth)
        return np.exp(betas[:, None, None] * samples)


class Foresight:
    """Of all drafts of a router."""

    def __init__(self) -> None:
        self._kinds = {is_sampled: _Kind() for is_sampled in (False, True)}

    def survival(self, candidates: Sequence[Candidate], *, is_idle: bool) -> Floats:
        """How likely the first 1, 2, ... coming drafts are to be accepted, in equally likely cases.

        Shapes: [sequences, samples, depth]; 0 where no draft may be.
        """
        depth = max((candidate.max_gamma for candidate in candidates), default=0)
        most_samples = max(FEWEST_SAMPLES, MOST_SAMPLES // max(1, len(candidates)))
        parts = [
            (indices, kind.foresee(seq_ids, depth, most_samples, is_idle=is_idle))
            for indices, seq_ids, kind in self._by_kind(candidates)
        ]
        num_samples = max((part.shape[1] for _, part in parts), default=1)
        survival = np.zeros((len(candidates), num_samples, depth))
        for indices, part in parts:
            survival[indices] = part
        most = np.array([candidate.max_gamma for candidate in candidates])
        return np.where(np.arange(depth) < most[:, None, None], survival, 0.0)

    def _by_kind(
        self, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[list[int], list[str], _Kind]]:
        """Where candidates of a kind stand, and their ids."""
        for is_sampled, kind in self._kinds.items():
            indices = [i for i, c in enumerate(candidates) if c.is_sampled == is_sampled]
            if indices:
                yield indices, [candidates[index].seq_id for index in indices], kind

    def stop_below(self, candidate: Candidate, least_survival: float) -> float:
        """The product of confidences below which fewer drafts survive than that."""
        calibration = self._of(candidate).calibration
        return calibration.least_product(candidate.seq_id, least_survival)

    def num_tested(self, candidate: Candidate) -> int:
        """Drafts of a sequence, since its start."""
        return self._of(candidate).acceptance.num_tested(candidate.seq_id)

    def of_drafted(self, drafted: Drafted) -> list[float]:
        """The probability that the first 1, 2, ... of these drafts are accepted."""
        return self._of(drafted).calibration.survival(drafted.seq_id, drafted.confidences)

    def add(self, drafted: Drafted) -> None:
        """Remember drafts, whatever becomes of them."""
        if drafted.confidences:
            self._of(drafted).paths.add(drafted.confidences)

    def observe(self, outcome: Outcome) -> None:
        self._of(outcome).acceptance.observe(outcome)
        self._of(outcome).calibration.observe(outcome)

    def fade(self) -> None:
        """Let what comes next soon outweigh what was: it may be of other texts."""
        for kind in self._kinds.values():
            kind.paths.fade()

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        for kind in self._kinds.values():
            kind.acceptance.forget(seq_id)
            kind.calibration.forget(seq_id)

    def _of(self, known: Candidate | Drafted | Outcome) -> _Kind:
        return self._kinds[known.is_sampled]
