"""Simulated machines: what rounds take, and what workers measure of themselves."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count

from deployments.router.policy.controller import DynamicGamma
from workers.types import StepTime

MAX_GAMMA = 8
FIXED = (0, 1, 2, 4, 6, 8)
"""What a dynamic gamma is compared with."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Milliseconds of a round: drafting to a depth, verifying a number of tokens."""

    hop: float
    """What a call to the drafter takes beside its steps."""
    draft_step: float
    first_draft: float = 0.0
    """What a drafter's step takes beside its drafts: it reads what is new first."""
    verify: float
    verify_token: float
    verify_wide: float = 0.0
    """More than 8 tokens cost this much more, as with matrix kernels that work in blocks."""
    verify_hop: float = 0.0
    """What a call to the target takes beside its step."""
    plain_more: float = 0.0
    """A round without drafts costs this much more, as texts are handed out during its step."""
    router: float = 0.0
    """What the router does between a round's calls and before the next round."""

    def step_s(self, num_tokens: float) -> float:
        """Seconds of a step of the target."""
        is_wide = num_tokens > 8
        return (self.verify + self.verify_token * num_tokens + self.verify_wide * is_wide) / 1e3

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        """Seconds of drafting and of verifying."""
        more_s = 0.0 if longest else self.plain_more / 1e3
        whole_draft = self.hop + self._reading + self.draft_step * longest
        draft_s = whole_draft / 1e3 if longest else 0.0
        return draft_s, self.verify_hop / 1e3 + self.step_s(num_tokens) + more_s

    def wait_s(self, num_prompt_tokens: float, draft_s: float) -> float:
        """Seconds from the end of drafting to that of a step of prompts, which began with it."""
        return max(0.0, self.step_s(num_prompt_tokens) - draft_s) if num_prompt_tokens else 0.0

    @property
    def _reading(self) -> float:
        """Milliseconds that the drafter reads before the first draft."""
        return self.first_draft

    def draft_shares(self, longest: int) -> tuple[float, float]:
        """The parts of the last round's drafting time that were the hop, and further drafts than
        the first, where that many were made; asked before `is_clean`."""
        whole = self.hop + self._reading + self.draft_step * longest
        return self.hop / whole, self.draft_step * max(0, longest - 1) / whole

    def is_clean(self, longest: int) -> bool:
        """Whether the drafters of the last round did nothing else; asked once."""
        del longest
        return True

    def tokens_per_s(self, gamma: int, alphas: Sequence[float], *, num_beside: float = 0) -> float:
        """To be expected of rounds in which every sequence has that many drafts, all of them
        verified: what runs with a fixed gamma come to, however sure a drafter is of its drafts.

        In every round `num_beside` tokens of prompts wait, which run while a drafter drafts."""
        num_own = len(alphas) * (gamma + 1)
        num_committed = sum(alpha**i for alpha in alphas for i in range(gamma + 1))
        if not gamma or not num_beside:
            return num_committed / self.expected_s(gamma, num_own + num_beside)
        wait_s = self.wait_s(num_beside, self.round_s(gamma, num_own)[0])
        return num_committed / (self.expected_s(gamma, num_own) + wait_s)

    def expected_s(self, longest: int, num_tokens: float) -> float:
        """Seconds of a round in the mean."""
        return sum(self.round_s(longest, num_tokens)) + self.router / 1e3

    def measured(self, *, most: int = 512) -> dict[str, list[StepTime]]:
        """The tables that the workers measure when they start, whose steps hold `most` tokens.

        They are a sixth too low, as nothing else runs then, and off by up to 3 % anywhere."""
        rng = random.Random(0)

        def time(num_sequences: int, num_tokens: int, true_s: float) -> StepTime:
            seconds = true_s / 1.2 * rng.uniform(0.97, 1.03)
            return StepTime(num_sequences=num_sequences, num_tokens=num_tokens, seconds=seconds)

        sizes = (1, 4, 16, 64)
        amounts = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512)
        return {
            "target_steps": [
                time(n, t, self.step_s(t)) for n in sizes for t in amounts if n <= t <= most
            ],
            "draft_steps": [time(n, n, self.draft_step / 1e3) for n in sizes],
        }

    def controller(self) -> DynamicGamma:
        """A new one for this machine."""
        return DynamicGamma(**self.measured())


class Graphed(Machine):
    """A GPU: memory limits steps of up to 64 tokens, and a step is padded to the next graph."""

    def step_s(self, num_tokens: float) -> float:
        padded = 2 ** math.ceil(math.log2(num_tokens))
        return super().step_s(max(0, padded - 64))


@dataclass(frozen=True, kw_only=True)
class StalledAtFirst(Machine):
    """Its first rounds with or without drafts take six times as long, as in a process that has just
    started."""

    are_drafted: bool
    stalls: list[None]
    """One entry for each stalled round that is still to come."""

    @classmethod
    def like(
        cls, machine: Machine, *, num_stalls: int = 2, are_drafted: bool = False
    ) -> "StalledAtFirst":
        return cls(**asdict(machine), stalls=[None] * num_stalls, are_drafted=are_drafted)

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        draft_s, verify_s = super().round_s(longest, num_tokens)
        if self.stalls and self.are_drafted == (longest > 0):
            self.stalls.pop()
            return 6.0 * draft_s, 6.0 * verify_s
        return draft_s, verify_s


@dataclass(frozen=True, kw_only=True)
class Stalling(Machine):
    """Other processes take its cores now and then, for longer than a step takes."""

    stall: float = 8.0
    every: int = 9
    """One in so many calls of a worker meets a stall."""
    _calls: Iterator[int] = field(default_factory=count)

    @classmethod
    def like(cls, machine: Machine) -> "Stalling":
        return cls(**asdict(machine))

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        draft_s, verify_s = super().round_s(longest, num_tokens)
        return draft_s + (self._stall_s() if longest else 0.0), verify_s + self._stall_s()

    def _stall_s(self) -> float:
        return 0.0 if next(self._calls) % self.every else self.stall / 1e3

    def expected_s(self, longest: int, num_tokens: float) -> float:
        num_calls = 1 + (longest > 0)
        undisturbed_s = sum(super().round_s(longest, num_tokens)) + self.router / 1e3
        return undisturbed_s + num_calls * self.stall / 1e3 / self.every


@dataclass(frozen=True, kw_only=True)
class Reading(Machine):
    """Its drafters first read what was written without them."""

    num_drafts: int = 7
    """As many drafts take as long as reading does after many rounds."""
    _unread: list[None] = field(default_factory=list)
    """One entry for each round since there were drafts."""

    @classmethod
    def like(cls, machine: Machine, **more: int) -> "Reading":
        return cls(**asdict(machine), **more)

    @property
    def _reading(self) -> float:
        share = min(1.0, len(self._unread) / 50)
        return super()._reading + self.draft_step * self.num_drafts * share

    def is_clean(self, longest: int) -> bool:
        is_clean = len(self._unread) <= longest
        self._unread[:] = [] if longest else [*self._unread, None]
        return is_clean


# one stream on a CPU, a GPU with a slow network, a machine whose batch is full already
CPU = Machine(hop=4, draft_step=1.5, verify=38, verify_token=1)
REMOTE = Machine(hop=8, draft_step=1, verify=25, verify_token=0.05)
FULL = Machine(hop=4, draft_step=1.5, verify=10, verify_token=8)
BLOCKS = Machine(hop=5, draft_step=2, verify=46, verify_token=0.8, verify_wide=14)
GPU = Graphed(hop=0.3, verify_hop=0.3, draft_step=0.8, verify=9, verify_token=0.06)
NODES = Machine(hop=2, verify_hop=2, draft_step=1.2, verify=20, verify_token=0.3)
# so small a model that it shows when texts are handed out
SMALL = Machine(hop=1.2, draft_step=0.3, verify=1.4, verify_token=0.02, plain_more=0.7)
# the 287M target of docs/ on two cores
WIDE = Machine(hop=2, draft_step=0.55, verify=14, verify_token=0.7)
# the demo pair on two cores: drafting takes as long as a step of the target
PAIR = Machine(hop=10, draft_step=3.7, verify=10.5, verify_token=0.065, verify_hop=1.4, router=3)
# a call to the drafter takes longer than a step of the target, so one draft never pays
DISTANT = Machine(hop=30, draft_step=1, verify=25, verify_token=0.05)
MACHINES = {
    "cpu": CPU, "remote": REMOTE, "full": FULL, "blocks": BLOCKS, "gpu": GPU, "nodes": NODES
}  # fmt: skip
