"""What a round costs, fitted to the rounds that were. Pure."""

from dataclasses import dataclass, field

MEMORY = 80.0
"""After how many rounds the past has lost 63 % of its weight."""


@dataclass(slots=True)
class LinearCost:
    """Seconds as base + slope * amount, by least squares with forgetting.

    While all amounts are alike their slope cannot be seen; a guess stands in, which the first
    differing amounts outweigh. Neither part is ever below zero.
    """

    relative_slope: float
    """The guess: the share of the mean cost that one more unit adds."""
    _weight: float = 0.0
    _amount: float = 0.0
    _amount_squared: float = 0.0
    _cost: float = 0.0
    _product: float = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight >= 1.0

    def observe(self, amount: float, cost_s: float) -> None:
        if self.is_known:
            # a pause of the machine is no property of the amount
            cost_s = min(cost_s, 3.0 * self(amount))
        decay = 1.0 - 1.0 / MEMORY
        self._weight = self._weight * decay + 1.0
        self._amount = self._amount * decay + amount
        self._amount_squared = self._amount_squared * decay + amount * amount
        self._cost = self._cost * decay + cost_s
        self._product = self._product * decay + amount * cost_s

    def __call__(self, amount: float) -> float:
        mean_amount, mean_cost = self._amount / self._weight, self._cost / self._weight
        variance = self._amount_squared / self._weight - mean_amount**2
        covariance = self._product / self._weight - mean_amount * mean_cost
        ridge = 0.05
        slope = (covariance + ridge * self.relative_slope * mean_cost) / (variance + ridge)
        slope = min(max(slope, 0.0), mean_cost / mean_amount if mean_amount else slope)
        return mean_cost + slope * (amount - mean_amount)


@dataclass(slots=True)
class RoundCost:
    """A round drafts up to its longest draft, then verifies all its tokens."""

    _draft: LinearCost = field(default_factory=lambda: LinearCost(relative_slope=0.2))
    _verify: LinearCost = field(default_factory=lambda: LinearCost(relative_slope=0.02))

    @property
    def is_known(self) -> bool:
        return self._draft.is_known and self._verify.is_known

    def observe(
        self, *, longest_draft: int, num_tokens: int, draft_s: float, verify_s: float
    ) -> None:
        """`num_tokens`: run by the target, drafts included."""
        if longest_draft > 0:
            self._draft.observe(longest_draft, draft_s)
        self._verify.observe(num_tokens, verify_s)

    def draft_s(self, longest_draft: int) -> float:
        return self._draft(longest_draft) if longest_draft else 0.0

    def verify_s(self, num_tokens: int) -> float:
        return self._verify(num_tokens)
