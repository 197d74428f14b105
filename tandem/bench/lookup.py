"""`tandem bench lookup`: one stream without a draft model, beside transformers' prompt lookup.

Both decode the same prompts with the same weights, greedily, in turns: the app over HTTP, and
`generate` of transformers in this process.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.arguments import drafters, whole
from tandem.bench.app import measured_app, target_folder
from tandem.bench.options import AppOptions, command_of, option
from tandem.bench.report import markdown_table, number, write_result
from tandem.bench.rows import DYNAMIC, paired_ratios
from tandem.live.client import Load
from tandem.live.texts import KINDS, make_prompts

NUM_LOOKUP_TOKENS = 10
"""What transformers' documentation recommends."""
WAYS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup": {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS},
}
"""Options of `generate`."""
BASE = "transformers, prompt lookup"


Sample = tuple[float, tuple[str, ...]]
"""Tokens per second, and the completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AppOptions):
    """One stream; every repeat takes each way once."""

    drafter: str = option("prompt_lookup", "the drafter of the app", type=drafters)
    text: str = option("copy", "the kind of prompts", choices=KINDS)
    num_prompts: int = option(8, "prompts of each repeat", type=whole)
    max_tokens: int = option(128, "tokens of a completion", type=whole)
    repeats: int = option(3, "how often all is measured; medians count", type=whole)
    seed: int = option(0, "the seed of the prompts", type=int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode, in each repeat."""

    name: str
    tokens_per_s: tuple[float, ...]
    texts: tuple[str, ...]
    """The completions of the last repeat."""


class Transformers:
    """`generate` of transformers, a prompt at a time."""

    def __init__(self, name: str) -> None:
        """`name` is a folder or an id; its own precision, on a GPU where there is one."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto", device_map={"": device}
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: Sequence[str], max_tokens: int, options: dict[str, Any]) -> Sample:
        """The first tokens behind each prompt, greedily, by these options of `generate`."""
        texts, started = [], time.perf_counter()
        for prompt in prompts:
            tokens = self._tokenizer(prompt, return_tensors="pt").to(self._model.device)
            completed = self._model.generate(
                input_ids=tokens.input_ids,
                attention_mask=tokens.attention_mask,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
            text = self._tokenizer.decode(completed[0, tokens.input_ids.shape[1] :])
            texts.append(str(text))
        return len(prompts) * max_tokens / (time.perf_counter() - started), tuple(texts)


def run(options: Options) -> str:
    """Measure all ways in turns; returns the table."""
    prompts = make_prompts(options.text, options.num_prompts, seed=options.seed)
    load = Load(prompts=prompts, max_tokens=options.max_tokens, temperature=0.0)
    theirs = Transformers(target_folder(options))
    with measured_app(options, (DYNAMIC,), drafter=options.drafter) as server:
        server.set_gamma(DYNAMIC)

        def measure() -> dict[str, Sample]:
            samples = {
                name: theirs.run(prompts, options.max_tokens, way) for name, way in WAYS.items()
            }
            result = server.run(load.again(), concurrency=1)
            return samples | {f"tandem, {options.drafter}": (result.tokens_per_s, result.texts)}

        measure()  # the first of everything is slower
        repeats = [measure() for _ in tqdm(range(options.repeats), desc="lookup")]
    ways = [
        Way(
            name=name,
            tokens_per_s=tuple(repeat[name][0] for repeat in repeats),
            texts=repeats[-1][name][1],
        )
        for name in repeats[0]
    ]
    table = format_table(ways)
    figures = {"options": options, "ways": ways}
    write_result(options.output, command_of("bench lookup", options), table, figures)
    return table


def format_table(ways: Sequence[Way]) -> str:
    """The ways as a Markdown table, each beside transformers' prompt lookup."""
    (base,) = [way for way in ways if way.name == BASE]

    def ratio(way: Way) -> str:
        return number(median(paired_ratios(way.tokens_per_s, base.tokens_per_s)), ".2f")

    columns: dict[str, Callable[[Way], str]] = {
        "one stream": lambda way: way.name,
        "tokens/s": lambda way: f"{median(way.tokens_per_s):.1f}",
        "least": lambda way: f"{min(way.tokens_per_s):.1f}",
        "most": lambda way: f"{max(way.tokens_per_s):.1f}",
        "/ transformers' prompt lookup": ratio,
        "texts as transformers' own": lambda way: (
            f"{sum(map(str.__eq__, way.texts, ways[0].texts))} of {len(way.texts)}"
        ),
    }
    return markdown_table(columns, ways)
