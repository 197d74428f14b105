"""What speculation can gain at best, by the formulas of Leviathan et al. 2023 (arXiv:2211.17192).

With a chance alpha for each draft token that was tested, gamma drafts give
(1 - alpha^(gamma + 1)) / (1 - alpha) tokens per round, and a round costs 1 + gamma (c + b) + 2 h
plain steps.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeCosts:
    """In plain decoding steps, the hop to the target included."""

    c: float
    """Drafting a token."""
    b: float
    """Verifying a token more."""
    two_h: float
    """What a round with drafts spends outside the workers' steps, beyond a plain one."""


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens per round, the target's own included."""
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1.0)) / (1.0 - alpha)


def speedup(alpha: float, gamma: float, costs: RelativeCosts) -> float:
    """Over plain decoding."""
    return expected_tokens(alpha, gamma) / (1.0 + gamma * (costs.c + costs.b) + costs.two_h)


def best_gamma(alpha: float, costs: RelativeCosts, *, most: int) -> int:
    """The draft length of the highest speed-up; 0 where none is above 1."""
    gains = {gamma: speedup(alpha, gamma, costs) for gamma in range(1, most + 1)}
    best = max(gains, key=lambda gamma: gains[gamma])
    return best if gains[best] > 1.0 else 0
