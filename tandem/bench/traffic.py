"""`tandem bench traffic`: how gamma=dynamic follows a text that changes.

One stream; the text goes from easy to hard and back to easy under one controller, which is told
nothing of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from tqdm import tqdm

from tandem.bench.client import Load, run_closed
from tandem.bench.plots import plot_traffic
from tandem.bench.report import markdown_table, write_report
from tandem.bench.rows import DYNAMIC, Setting
from tandem.bench.served import ServedOptions, header, measure, measured_server
from tandem.bench.texts import make_prompts

TEXTS = ("easy", "hard", "easy")
NEAR = 1.0
"""Drafts of a phase's settled length that count as having arrived."""
WINDOW = 10
"""Rounds over which the length is averaged to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions(ServedOptions):
    num_prompts: int
    """Of each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What was measured while the text was of one kind."""

    text: str
    tokens_per_s: float
    alpha: float
    gammas: tuple[float, ...]
    """The mean draft length chosen in each round."""

    @property
    def settled_gamma(self) -> float:
        """Of the second half."""
        return mean(self.gammas[len(self.gammas) // 2 :])

    @property
    def num_rounds_to_settle(self) -> int:
        """After how many rounds the length first came near the settled one."""
        for end in range(min(WINDOW, len(self.gammas)), len(self.gammas)):
            if abs(mean(self.gammas[max(0, end - WINDOW) : end]) - self.settled_gamma) <= NEAR:
                return end
        return len(self.gammas)


def run_traffic(options: TrafficOptions) -> list[Phase]:
    """One stream of texts that change, under gamma=dynamic; write JSON, a table and a plot."""
    prompts = {text: make_prompts(text, options.num_prompts, seed=options.seed) for text in TEXTS}
    phases = []
    with measured_server(options) as server:
        plain = Setting(text=TEXTS[0], temperature=0.0, concurrency=1, gamma=0)
        measure(server, plain, prompts[TEXTS[0]][:2], options.max_tokens)
        server.set_gamma(DYNAMIC)
        for text in tqdm(TEXTS, desc="traffic"):
            load = Load(prompts=prompts[text], max_tokens=options.max_tokens, temperature=0.0)
            result = asyncio.run(run_closed(server.endpoint, load, concurrency=1))
            statistics = server.take_statistics()
            phases.append(
                Phase(
                    text=text,
                    tokens_per_s=result.tokens_per_s,
                    alpha=statistics.num_accepted / max(statistics.num_tested, 1),
                    gammas=statistics.gammas,
                )
            )
        report = {**header(options, server), "phases": [asdict(phase) for phase in phases]}
    write_report(options.output, "traffic", report, format_table(phases))
    plot_traffic(phases, options.output / "traffic.png")
    return phases


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
