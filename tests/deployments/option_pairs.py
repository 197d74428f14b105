"""Every two of the options that decide what runs: served together, or refused in a sentence.

`test_option_pairs` tries them, and those of two ranks `tests/cluster/test_tensor_parallel.py`. A
table of docs/exactness.md is written from this.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cluster.options import AppArgs
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import (
    CACHE,
    GREEDY,
    SAMPLED,
    Models,
    load_noisy,
    make_params,
    run_all,
    running_loop,
)
from tests.fakes import LocalWorkers
from tests.grammars import END_TOKEN, VOCAB_SIZE, save_grammar_model
from tests.tiny_models import save_model
from tests.tokenizers import save_permuted
from workers.drafters.translated import make_drafter
from workers.model import Model, load_model
from workers.paged_model import Ranks
from workers.quantization import Quantization
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.vocabulary import compare_vocabularies

TWO_RANKS = "`tensor_parallel_size=2`"
RECURRENT = "a target with recurrent layers"
OTHER_TOKENS = "a draft model with another tokenizer"
EARLY_EXIT = "`drafter=early_exit`"
INT8 = "`quantization=int8`"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "`drafter=suffix`": {"drafter": "suffix"},
    OTHER_TOKENS: {"drafter": "model", "draft": "permuted"},
    EARLY_EXIT: {"drafter": "early_exit", "early_exit_layer": 2},
    "`verification=block`": {"verification": "block"},
    INT8: {"quantization": "int8"},
    RECURRENT: {"target": "recurrent"},
    TWO_RANKS: {"tensor_parallel_size": 2},
}
"""The values of each, with models by the names that `save_models` gives them. Two drafters make a
list, and where there is none, a draft model that has the target's tokenizer drafts."""
Pair = frozenset[str]
PAIRS: tuple[Pair, ...] = tuple(map(frozenset, combinations(OPTIONS, 2)))
REFUSED: Mapping[Pair, str] = {
    frozenset({EARLY_EXIT, RECURRENT}): "early_exit_layer is 2, but {target} has recurrent "
    "layers, whose states drafts would change; use another drafter",
    frozenset({INT8, TWO_RANKS}): "quantization=int8 is not served with tensor_parallel_size=2; "
    "use tensor_parallel_size=1, or a checkpoint that is quantized already",
}
"""The sentence of each pair that is not served."""
DETERMINED = SamplingParams(temperature=0.8, top_k=1)
"""Drawn, from a law of one token: a rule that compares laws has to give its text too."""
NUM_PARAMS = 6
NUM_TOKENS = 12
GAMMA = 4


def name_of(pair: Pair) -> str:
    """The two in the order of OPTIONS."""
    return " and ".join(option for option in OPTIONS if option in pair)


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each option: its name, then whether each is served with it."""
    numbers = {pair: number for number, pair in enumerate(REFUSED, start=1)}
    for option in OPTIONS:
        pairs = [frozenset({option, other}) for other in OPTIONS]
        yield (
            option,
            *(
                "" if len(pair) == 1 else f"no ({numbers[pair]})" if pair in numbers else "yes"
                for pair in pairs
            ),
        )


def save_models(folder: Path) -> None:
    """Write tiny models that have one tokenizer, and one that has another."""
    target = save_grammar_model(folder / "attending")
    save_permuted(target, folder / "permuted")
    recurrent = save_model(
        folder / "recurrent", "qwen3_next", vocab_size=VOCAB_SIZE, eos_token_id=END_TOKEN
    )
    AutoTokenizer.from_pretrained(target).save_pretrained(recurrent)


def options_of(pair: Pair, folder: Path) -> dict[str, Any]:
    """The options of both, on the models of a folder."""
    chosen = [OPTIONS[option] for option in OPTIONS if option in pair]
    drafters = [values["drafter"] for values in chosen if "drafter" in values] or ["model"]
    options = {"target": "attending", "draft": "attending"}
    for values in chosen:
        options |= values
    options["drafter"] = ",".join(drafters)
    if "model" not in drafters:
        del options["draft"]
    models = {name: str(folder / options[name]) for name in ("target", "draft") if name in options}
    return options | models


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What was written, and who drafted."""

    token_ids: list[list[int]]
    """The token ids of each completion, in the order of `all_params`."""
    sources: set[str]
    """The drafters of which some draft was tested."""


class PlainTexts:
    """What one rank writes without drafts, each text alone. Drafters decide nothing of it, so what
    differs in them only is written once."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, ...], list[list[int]]] = {}

    async def of(self, args: AppArgs) -> list[list[int]]:
        """The token ids of each completion of a target with these options."""
        key = (args.target, args.verification, args.quantization)
        if key not in self._texts:
            texts = await write(args, is_plain=True)
            assert texts.sources == set()
            self._texts[key] = texts.token_ids
        return self._texts[key]


async def write(args: AppArgs, ranks: Ranks | None = None, *, is_plain: bool = False) -> Texts:
    """The texts of a target with these options, which `ranks` share; all at once with drafts, or
    one after the other without."""
    target = load_target(args)
    draft = load_draft(args.draft_model or args.target)
    vocabulary = compare_vocabularies(args.target, draft.name)
    drafts = LocalWorkers(lambda: make_drafter(draft, vocabulary, CACHE, target=args.target))
    targets = LocalWorkers(
        lambda: Target(
            target,
            CACHE,
            max_batched_tokens=32,
            ranks=ranks,
            early_exit_layer=args.early_exit_layer,
        )
    )
    async with running_loop(
        Models(target=target, draft=draft),
        gamma=0 if is_plain else GAMMA,
        drafter=args.drafter,
        drafts=drafts,
        targets=targets,
    ) as (loop, _, observer):
        params = all_params(args)
        streams = await run_all(loop, params, concurrency=1 if is_plain else NUM_PARAMS)
    return Texts(
        token_ids=[stream.token_ids for stream in streams],
        sources={
            outcome.source
            for record in observer.records
            for outcome in record.outcomes
            if outcome.num_tested
        },
    )


@lru_cache
def load_draft(name: str) -> Model:
    return load_noisy(name)


@lru_cache
def load_whole(name: str, quantization: Quantization) -> Model:
    return load_model(name, dtype="float32", device="cpu", quantization=quantization)


def load_target(args: AppArgs) -> Model:
    """Ranks have a part each, which nobody shares with them."""
    if args.tensor_parallel_size == 1:
        return load_whole(args.target, args.quantization)
    return load_model(
        args.target,
        dtype="float32",
        device="cpu",
        tp_size=args.tensor_parallel_size,
        quantization=args.quantization,
    )


def all_params(args: AppArgs) -> list[GenerationParams]:
    """Greedy and drawn, each for all drafters and for every one alone."""
    drawn = SAMPLED if args.verification == "coupled" else DETERMINED
    ways = (None, *args.drafters)
    return [
        make_params(
            seed,
            sampling=(GREEDY, drawn)[seed % 2],
            max_tokens=NUM_TOKENS,
            drafter=ways[seed // 2 % len(ways)],
            verification=args.verification,
        )
        for seed in range(NUM_PARAMS)
    ]
