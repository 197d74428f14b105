"""P(the first j drafts are accepted), learnt from what the target tested.

A draft after the first rejection was never tested, so it says nothing: accepted / drafted would
read 0.42 where eight drafts are accepted with probability 0.8 each.

Every draft token has a confidence c: its drafter's, or where that is silent the rate at which the
source's drafts at this position were accepted, given that those before were. Then

    P(accepted) = c ** (beta_source * beta_sequence)

where beta_source is 1 for silent sources. Both exponents follow the gradient of the likelihood in
steps that shrink as information gathers, as far as a memory reaches (natural gradient).
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deployments.router.policy.gamma import Candidate, Drafted, Outcome
from workers.types import Rule

Floats = NDArray[np.float64]
Kind = tuple[str, bool, Rule]
"""Drafts that are alike: of a source, sampled or not, judged by a rule."""

FIRST_EXPONENT = 0.5
"""The guess of beta_source: drafters tend to be less sure than they could be."""
FIRST_RATE = 0.7
"""The guess of how often drafts are accepted whose source gives no confidences."""
MEMORY = 150.0
"""The number of tested tokens after which the past has lost 63 % of its weight."""
PRIOR = 4.0
"""The weight of a guess, in tested tokens or their information (about 0.2 each)."""
LARGEST_LOG = 4.0
"""How far an exponent may be from its guess, as a logarithm: a factor of 50."""
LEAST_CERTAIN, MOST_CERTAIN = 1e-6, 0.999
"""The bounds of a confidence. What is no number counts as the least certain."""
NUM_PATHS = 64
"""The number of drafts whose confidences are remembered, as samples of the next ones."""


@dataclass(slots=True)
class Exponent:
    """The logarithm of an exponent, learnt online; its prior mean is 0."""

    log: float = 0.0
    information: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm."""
        return 1.0 / math.sqrt(self.information + PRIOR)

    def observe(self, exponent: float, *, is_accepted: bool) -> None:
        """Learn from a token that was expected with probability exp(-exponent)."""
        odds = 1.0 / math.expm1(exponent)
        gradient = -exponent if is_accepted else exponent * odds
        self.information = self.information * (1.0 - 1.0 / MEMORY) + exponent**2 * odds
        # the pull of the prior fades with what the memory forgets
        step = (gradient - PRIOR / MEMORY * self.log) / (self.information + PRIOR)
        self.log = min(max(self.log + step, -LARGEST_LOG), LARGEST_LOG)


@dataclass(slots=True)
class Rate:
    """The share of tested drafts at one position that were accepted, older ones counting less."""

    accepted: float = 0.0
    tested: float = 0.0

    def observe(self, *, is_accepted: bool) -> None:
        decay = 1.0 - 1.0 / MEMORY
        self.accepted = self.accepted * decay + is_accepted
        self.tested = self.tested * decay + 1.0

    def shrunk_to(self, guess: float) -> float:
        return (self.accepted + PRIOR * guess) / (self.tested + PRIOR)


class Acceptance:
    """What is known of how often drafts of one kind are accepted."""

    def __init__(self) -> None:
        self._overall = Rate()
        self._positions: dict[int, Rate] = {}
        self._exponent = Exponent()
        self._sequences: dict[str, Exponent] = {}
        self._paths: deque[tuple[float, ...]] = deque(maxlen=NUM_PATHS)
        """The logarithms of the confidences of the last drafts."""
        self._later: deque[float] = deque(maxlen=2 * NUM_PATHS)
        """The logarithms of the confidences of all but the first token of the last drafts."""

    @property
    def has_confidences(self) -> bool:
        """Whether the source has ever said how sure it is of its drafts."""
        return bool(self._paths)

    def survival(self, drafted: Drafted) -> list[float]:
        """The probability that the first 1, 2, ... of these drafts are accepted."""
        exponent = self._exponent_of(drafted.seq_id, is_silent=not drafted.confidences)
        log, survival = 0.0, []
        for token_log in self._logs(drafted.confidences, drafted.num_draft_tokens):
            log += exponent * token_log
            survival.append(math.exp(log))
        return survival

    def foresee(
        self, seq_ids: Sequence[str], depth: int, num_samples: int, *, optimism: float
    ) -> Floats:
        """What `survival` may say of the next drafts of these sequences, in equally likely cases.

        Shapes: [sequences, samples, depth]; for silent sources 1 sample.
        """
        is_silent = not self.has_confidences
        if is_silent:
            paths = np.array([list(self._logs((), depth))])
        else:
            paths = self._last_paths(min(NUM_PATHS, len(seq_ids) * num_samples), depth)
        logs = np.resize(
            paths.cumsum(axis=1), (len(seq_ids), 1 if is_silent else num_samples, depth)
        )
        exponents = [self._exponent_of(seq_id, is_silent=is_silent) for seq_id in seq_ids]
        bonus = math.exp(-optimism * self._exponent.deviation)
        survival: Floats = np.exp(bonus * np.array(exponents)[:, None, None] * logs)
        return survival

    def least_product(self, seq_id: str, least_survival: float) -> float:
        """The product of confidences with which drafts survive with that probability."""
        return float(least_survival ** (1.0 / self._exponent_of(seq_id, is_silent=False)))

    def remember(self, drafted: Drafted) -> None:
        """Keep confidences, whatever becomes of the drafts."""
        logs = tuple(_log(confidence) for confidence in drafted.confidences)
        if logs:
            self._paths.append(logs)
            self._later.extend(logs[1:])

    def observe(self, outcome: Outcome) -> None:
        """Learn from the tested drafts of a sequence."""
        seq_id = outcome.seq_id
        sequence = self._sequences.setdefault(seq_id, Exponent())
        is_silent = not outcome.confidences
        for position, log in enumerate(self._logs(outcome.confidences, outcome.num_tested)):
            is_accepted = position < outcome.num_accepted
            exponent = -log * self._exponent_of(seq_id, is_silent=is_silent)
            sequence.observe(exponent, is_accepted=is_accepted)
            self._exponent.observe(exponent, is_accepted=is_accepted)
            self._overall.observe(is_accepted=is_accepted)
            self._positions.setdefault(position, Rate()).observe(is_accepted=is_accepted)

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        self._sequences.pop(seq_id, None)

    def _logs(self, confidences: Sequence[float], num_tokens: int) -> Iterator[float]:
        """The logarithm of each token's confidence, or of its position's rate."""
        if confidences:
            yield from (_log(confidence) for confidence in confidences[:num_tokens])
            return
        overall = self._overall.shrunk_to(FIRST_RATE)
        for position in range(num_tokens):
            yield _log(self._positions.get(position, Rate()).shrunk_to(overall))

    def _exponent_of(self, seq_id: str, *, is_silent: bool) -> float:
        sequence = self._sequences.get(seq_id)
        log = sequence.log if sequence is not None else 0.0
        return math.exp(log) if is_silent else FIRST_EXPONENT * math.exp(self._exponent.log + log)

    def _last_paths(self, num_paths: int, depth: int) -> Floats:
        """The logarithms of the last drafts' confidences; each goes on as others did.

        A draft that was sure so far is not much surer than others of what comes next.
        Shapes: [at most num_paths, depth].
        """
        last = [self._paths[-1 - index] for index in range(min(num_paths, len(self._paths)))]
        chosen = [path[:depth] for path in last]
        later = np.array(self._later or [_mean(last)])
        paths = np.resize(later, (len(chosen), depth))
        for path, logs in zip(paths, chosen, strict=True):
            path[: len(logs)] = logs
        return paths


def _mean(paths: Sequence[Sequence[float]]) -> float:
    """The mean of all values of these paths."""
    return sum(map(sum, paths)) / sum(map(len, paths))


class AcceptanceBySource:
    """What is known of all drafts of a router, each kind apart.

    How far drafts go, and what a confidence means, differ between kinds.
    """

    def __init__(self) -> None:
        self._by_kind: defaultdict[Kind, Acceptance] = defaultdict(Acceptance)

    def of(self, drafts: Candidate | Drafted | Outcome) -> Acceptance:
        """What is known of the source of these drafts."""
        return self._by_kind[_kind(drafts)]

    def foresee(
        self, candidates: Sequence[Candidate], *, num_samples: int, optimism: float
    ) -> Floats:
        """P(the first 1, 2, ... coming drafts are accepted), in equally likely cases.

        `optimism` is the number of standard deviations that sources are given the benefit of.
        Shapes: [sequences, samples, depth]; 0 where no draft may be.
        """
        most = np.array([candidate.max_gamma for candidate in candidates], dtype=int)
        depth = int(most.max(initial=0))
        survival = np.zeros((len(candidates), num_samples, depth))
        by_kind: dict[Kind, list[int]] = {}
        for index, candidate in enumerate(candidates):
            by_kind.setdefault(_kind(candidate), []).append(index)
        for indices in by_kind.values():
            seq_ids = [candidates[index].seq_id for index in indices]
            known = self.of(candidates[indices[0]])
            survival[indices] = known.foresee(seq_ids, depth, num_samples, optimism=optimism)
        survival[np.arange(depth) >= most[:, None, None].repeat(num_samples, axis=1)] = 0.0
        return survival

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        for acceptance in self._by_kind.values():
            acceptance.forget(seq_id)


def _kind(drafts: Candidate | Drafted | Outcome) -> Kind:
    return drafts.source, drafts.is_sampled, drafts.rule


def _log(confidence: float) -> float:
    """The logarithm of a confidence, within bounds."""
    if not math.isfinite(confidence):
        confidence = LEAST_CERTAIN
    return math.log(min(max(confidence, LEAST_CERTAIN), MOST_CERTAIN))
