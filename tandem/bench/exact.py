"""`tandem bench exact`: where texts differ from plain decoding, and by how little.

In exact arithmetic speculation never changes a text. In 16 bits the logits of a token may depend on
how many tokens ran with it, so two that nearly tie may change places, with speculation or without:
plain decoding in a batch differs from plain decoding alone in the same way. This counts both, and
shows for each text that differs how far apart the two tokens' logits were where it first did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import bundled
from tandem.arguments import whole
from tandem.bench.options import ModelOptions, command_of, option
from tandem.bench.report import markdown_table, write_result
from tandem.decoding import Decoder
from tandem.demo.grow import grown_target
from tandem.live.texts import make_prompts
from workers.drafters.model import ModelDrafter, load_draft_model
from workers.model import load_model
from workers.paged_model import CacheOptions
from workers.target import Target

BATCH_SIZE = 8
GAMMAS = (2, 4, 8)
MAX_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ModelOptions):
    """The prompts and the tokens that are decoded in each way."""

    num_prompts: int = option(8, "prompts, each decoded in every way", type=whole)
    max_tokens: int = option(128, "tokens of a completion", type=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRow:
    """One way of decoding against plain decoding alone."""

    name: str
    num_texts: int
    gaps: tuple[float, ...]
    """The distance of the logits of the two tokens where a text first differs, for each text that
    does, in fp32 arithmetic with the same weights."""


def run(options: Options) -> str:
    """Decode in all ways; returns the table."""
    target_name = bundled.resolve(options.target or grown_target(options.work))
    decoder = _make_decoder(target_name, options)
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    prompts = [tokenizer.encode(text) for text in make_prompts("easy", options.num_prompts)]

    def decode(size: int, gamma: int) -> list[list[int]]:
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return [
            text
            for batch in tqdm(batches, desc=f"gamma {gamma}, {size} at a time")
            for text in decoder.decode(batch, options.max_tokens, gamma=gamma)
        ]

    plain = decode(1, 0)
    ways = {f"plain, {BATCH_SIZE} at a time": decode(BATCH_SIZE, 0)}
    ways |= {f"gamma {gamma}, alone": decode(1, gamma) for gamma in GAMMAS}
    ways |= {f"gamma 4, {BATCH_SIZE} at a time": decode(BATCH_SIZE, 4)}
    rows = [
        ExactRow(
            name=name, num_texts=len(texts), gaps=logit_gaps(target_name, prompts, plain, texts)
        )
        for name, texts in ways.items()
    ]
    table = format_table(rows)
    figures = {"options": options, "rows": rows}
    write_result(options.output, command_of("bench exact", options), table, figures)
    return table


def _make_decoder(target_name: str, options: Options) -> Decoder:
    """A decoder without a prefix cache, so that each way of decoding computes all of its texts."""
    cache = CacheOptions(max_num_seqs=BATCH_SIZE, max_model_len=MAX_LEN, prefix_caching=False)
    target = Target(load_model(target_name), cache)
    drafter = ModelDrafter(load_draft_model(bundled.resolve(options.draft)), cache)
    if options.compile:
        for worker in (target, drafter):
            worker.start_compiling().join()
    return Decoder(target, drafter)


def format_table(rows: Sequence[ExactRow]) -> str:
    """The rows as a Markdown table."""
    columns: dict[str, Callable[[ExactRow], str]] = {
        "decoding": lambda row: row.name,
        "texts": lambda row: str(row.num_texts),
        "that differ": lambda row: str(len(row.gaps)),
        "logit gaps there": lambda row: ", ".join(f"{gap:.3f}" for gap in sorted(row.gaps)),
    }
    return markdown_table(columns, rows)


def logit_gaps(
    target: str,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> tuple[float, ...]:
    """The distance of the two tokens' logits where a text first differs, for each that does."""
    forks = []
    for prompt, expected, text in zip(prompts, plain, texts, strict=True):
        pairs = enumerate(zip(expected, text, strict=True))
        first = next((i for i, (one, other) in pairs if one != other), None)
        if first is not None:
            forks.append(([*prompt, *expected[:first]], expected[first], text[first]))
    if not forks:
        return ()
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [reference(torch.tensor([prefix])).logits[0, -1] for prefix, _, _ in forks]
    return tuple(
        float((row[one] - row[other]).abs())
        for row, (_, one, other) in zip(logits, forks, strict=True)
    )
