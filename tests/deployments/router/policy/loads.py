"""A load on a simulated machine: texts that go on while prompts come."""

import random
from dataclasses import dataclass

from deployments.router.policy.gamma import Candidate, GammaController, Maker
from tests.deployments.router.policy.machines import MAX_GAMMA, Machine
from tests.deployments.router.policy.simulation import draw_drafts, judge_all, observe
from tests.deployments.simulated_drafts import confidence, varied


@dataclass
class Served:
    first_tokens_s: list[float]
    """How long each request waited for its first token."""
    tokens_per_s: float

    def first_token_s(self, quantile: float) -> float:
        return sorted(self.first_tokens_s)[int(quantile * len(self.first_tokens_s))]


@dataclass
class _Prompt:
    seq_id: str
    num_left: int
    came_s: float


@dataclass(kw_only=True)
class Load:
    """Streams that all begin at once, and ask again as soon as they are answered."""

    num_streams: int
    num_requests: int
    prompt_len: int
    num_output: int = 100
    max_batched_tokens: int = 256
    """A step runs prompts in what its verifications leave of this, but 16 tokens at least; while a
    drafter drafts, it runs nothing else."""
    alpha: float = 0.8
    maker: Maker = Maker.DRAFTER
    """What makes the drafts. Those of a drafter take its time, all others none."""

    def serve(self, controller: GammaController, machine: Machine) -> Served:
        rng, now_s, num_begun, num_tokens, num_known = random.Random(0), 0.0, 0, 0, 0

        def sure(_: int, chance: float) -> float:
            return confidence(chance)

        waiting: list[_Prompt] = []
        running: dict[str, int] = {}
        first_tokens_s: list[float] = []
        while num_begun < self.num_requests or waiting or running:
            while num_begun < self.num_requests and len(waiting) + len(running) < self.num_streams:
                length = rng.randint(self.prompt_len // 2, self.prompt_len * 3 // 2)
                waiting.append(_Prompt(str(num_begun), length, now_s))
                num_begun += 1
            candidates = [
                Candidate(seq_id=seq_id, max_gamma=min(MAX_GAMMA, num_left - 1), maker=self.maker)
                for seq_id, num_left in running.items()
            ]
            decision = controller.choose(candidates, num_prefill_tokens=num_known)
            chances, drafted = draw_drafts(
                rng, candidates, decision, lambda _: self.alpha, varied, sure
            )
            kept = controller.select(decision, drafted)
            outcomes = judge_all(rng, drafted, kept, chances)
            is_drafted = self.maker is Maker.DRAFTER
            longest = max(map(len, chances.values()), default=0) if is_drafted else 0
            num_own = len(running) + sum(kept)
            num_early, early = self._prefill(waiting, 0) if longest else (0, [])
            early_s = machine.wait_s(num_early, 0.0)
            first_tokens_s += [now_s + early_s - prompt.came_s for prompt in early]
            num_prefill, done = self._prefill(waiting, num_own)
            draft_s, verify_s = machine.round_s(longest, num_own + num_prefill)
            verify_s += machine.wait_s(num_early, draft_s)
            now_s += draft_s + verify_s + machine.router / 1e3
            accepted = {outcome.seq_id: outcome.num_accepted for outcome in outcomes}
            if running:
                controller.observe(
                observe(
                    machine, decision, outcomes, num_sequences=len(running), longest=longest,
                    num_drafted=len(drafted), num_own=num_own,
                    num_beside=num_early + num_prefill,
                    draft_s=draft_s, verify_s=verify_s,
                )
            )  # fmt: skip
            for seq_id in list(running):
                num_new = min(running[seq_id], 1 + accepted.get(seq_id, 0))
                num_tokens, running[seq_id] = num_tokens + num_new, running[seq_id] - num_new
                if not running[seq_id]:
                    del running[seq_id]
                    controller.forget(seq_id)
            first_tokens_s += [now_s - prompt.came_s for prompt in done]
            for prompt in early + done:
                running[prompt.seq_id] = self.num_output - 1
            num_known = min(self.max_batched_tokens, sum(prompt.num_left for prompt in waiting))
        return Served(first_tokens_s, num_tokens / now_s)

    def _prefill(self, waiting: list[_Prompt], num_own: int) -> tuple[int, list[_Prompt]]:
        """Run prompts in what is left of a step; how many tokens, and which prompts are done."""
        num_run, done = 0, []
        room = max(16, self.max_batched_tokens - num_own)
        for prompt in list(waiting):
            num_tokens = min(prompt.num_left, room - num_run)
            prompt.num_left -= num_tokens
            num_run += num_tokens
            if not prompt.num_left:
                waiting.remove(prompt)
                done.append(prompt)
        return num_run, done
