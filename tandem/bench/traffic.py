"""`tandem bench traffic`: how gamma=dynamic follows a text that changes.

One stream; the text goes from easy to hard and back to easy under one controller, which is told
nothing of it. One stream gets an event per round, so the usage of its events tells each round's
draft length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from tqdm import tqdm

from tandem.arguments import whole
from tandem.bench.app import measured_app
from tandem.bench.options import AppOptions, command_of, option
from tandem.bench.report import markdown_table, write_result
from tandem.bench.rows import DYNAMIC
from tandem.live.client import Load, LoadResult
from tandem.live.texts import make_prompts

TEXTS = ("easy", "hard", "easy")
NEAR = 1.0
"""Within so many drafts of the settled length, the length has arrived."""
WINDOW = 10
"""The length is averaged over so many rounds to tell that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AppOptions):
    """Requests of each phase, one after the other."""

    num_prompts: int = option(8, "prompts of each phase", type=whole)
    max_tokens: int = option(128, "tokens of a completion", type=whole)
    seed: int = option(0, "the seed of the prompts", type=int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The figures of the time in which the text was of one kind."""

    text: str
    tokens_per_s: float
    alpha: float
    """Accepted draft tokens over tested ones."""
    gammas: tuple[int, ...]
    """The draft length of each round."""

    @property
    def settled_gamma(self) -> float:
        """The mean draft length of the second half."""
        return mean(self.gammas[len(self.gammas) // 2 :])

    @property
    def num_rounds_to_settle(self) -> int:
        """After how many rounds the length first came near the settled one."""
        for end in range(min(WINDOW, len(self.gammas)), len(self.gammas)):
            if abs(mean(self.gammas[max(0, end - WINDOW) : end]) - self.settled_gamma) <= NEAR:
                return end
        return len(self.gammas)


def run(options: Options) -> str:
    """Measure the phases in turn; returns the table."""
    with measured_app(options, (DYNAMIC,)) as server:
        loads = {text: make_prompts(text, options.num_prompts, seed=options.seed) for text in TEXTS}
        # at gamma 0, so that the controller learns nothing
        server.run(_load(loads[TEXTS[0]][:2], options), concurrency=1)
        server.set_gamma(DYNAMIC)
        phases = [
            make_phase(text, server.run(_load(loads[text], options), concurrency=1))
            for text in tqdm(TEXTS, desc="traffic")
        ]
    table = format_table(phases)
    figures = {"options": options, "phases": phases}
    write_result(options.output, command_of("bench traffic", options), table, figures)
    return table


def make_phase(text: str, result: LoadResult) -> Phase:
    """The rounds of a load, told by its events; each answer's first event is its prompt's."""
    rounds = [
        (late.usage.num_drafted - early.usage.num_drafted,
         late.usage.num_accepted - early.usage.num_accepted)
        for answer in result.answers
        for early, late in pairwise(answer.events)
    ]  # fmt: skip
    num_accepted = sum(accepted for _, accepted in rounds)
    num_rejected = sum(accepted < drafted for drafted, accepted in rounds)
    return Phase(
        text=text,
        tokens_per_s=result.tokens_per_s,
        alpha=num_accepted / max(1, num_accepted + num_rejected),
        gammas=tuple(drafted for drafted, _ in rounds),
    )


def format_table(phases: Sequence[Phase]) -> str:
    """The phases as a Markdown table."""
    columns: dict[str, Callable[[Phase], str]] = {
        "text": lambda phase: phase.text,
        "rounds": lambda phase: str(len(phase.gammas)),
        "tokens/s": lambda phase: f"{phase.tokens_per_s:.1f}",
        "alpha": lambda phase: f"{phase.alpha:.3f}",
        "settled draft length": lambda phase: f"{phase.settled_gamma:.1f}",
        "rounds until there": lambda phase: str(phase.num_rounds_to_settle),
    }
    return markdown_table(columns, phases)


def _load(prompts: Sequence[str], options: Options) -> Load:
    return Load(prompts=prompts, max_tokens=options.max_tokens, temperature=0.0)
