"""`tandem bench engine`: the workers alone, without Ray and without hops."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster import bundled
from tandem.arguments import whole
from tandem.bench.options import ModelOptions, command_of, option
from tandem.bench.report import markdown_table, write_result
from tandem.demo.grow import grown_target
from workers.drafters.model import ModelDrafter, load_draft_model
from workers.model import load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import ProposeRequest, VerifyRequest

CONTEXT_LEN = 200
NUM_DRAFTED = 8
# (sequences, tokens each): single tokens, verifications, and batches of them
STEPS = ((1, 1), (1, 5), (1, 8), (8, 1), (8, 5), (16, 1), (16, 2), (16, 3))

Action = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ModelOptions):
    """The number of repeats and of threads."""

    repeats: int = option(20, "timed steps of each kind; medians count", type=whole)
    num_threads: int | None = option(None, "threads (default: torch's own)", type=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """Medians, in seconds."""

    num_sequences: int
    num_tokens: int
    """New tokens per sequence."""
    products_s: float
    """The model's matrix products alone, one by one, by `torch.nn.functional.linear`."""
    transformers_s: float
    """The model's own eager forward, without a context."""
    target_s: float
    """A step of our target at CONTEXT_LEN: planning, forward, sampling, judging."""
    draft_s: float
    """One draft token for all sequences: a step of our drafter, of NUM_DRAFTED in a call."""


def run(options: Options) -> str:
    """Measure the kinds of steps of each size in turns; returns the table."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    name = bundled.resolve(options.target or grown_target(options.work))
    cache = CacheOptions(
        max_model_len=CONTEXT_LEN + NUM_DRAFTED,
        max_num_seqs=max(num_sequences for num_sequences, _ in STEPS),
        prefix_caching=False,  # each sequence in blocks of its own, as different texts are
    )
    target = Target(load_model(name), cache)
    drafter = ModelDrafter(load_draft_model(bundled.resolve(options.draft)), cache)
    if options.compile:
        target.start_compiling().join()
        by_one_thread(lambda: drafter.start_compiling().join())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map={"": device})
    rows = [_measure(plain, target, drafter, *step, options.repeats) for step in STEPS]
    table = format_table(rows)
    figures = {"options": options, "context_len": CONTEXT_LEN, "rows": rows}
    write_result(options.output, command_of("bench engine", options), table, figures)
    return table


def _measure(
    plain: PreTrainedModel,
    target: Target,
    drafter: ModelDrafter,
    num_sequences: int,
    num_tokens: int,
    repeats: int,
) -> EngineRow:
    def verify(base_len: int, num_drafts: int) -> object:
        drafts = (0,) * num_drafts
        shared = [_shared(index, base_len) for index in range(num_sequences)]
        return target.verify([VerifyRequest(**each, draft_tokens=drafts) for each in shared])

    def draft(base_len: int, num_drafts: int) -> object:
        shared = [_shared(index, base_len) for index in range(num_sequences)]
        return drafter.propose([ProposeRequest(**each, k=num_drafts) for each in shared])

    verify(0, 0)  # both hold the contexts from now on
    draft(0, 0)
    products_s, transformers_s, target_s, drafting_s = median_times(
        [
            _products(plain, num_sequences * num_tokens),
            _own_forward(plain, num_sequences, num_tokens),
            lambda: verify(CONTEXT_LEN - 1, num_tokens - 1),
            lambda: by_one_thread(lambda: draft(CONTEXT_LEN - 1, NUM_DRAFTED)),
        ],
        repeats,
        name=f"{num_sequences} x {num_tokens}",
    )
    return EngineRow(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        products_s=products_s,
        transformers_s=transformers_s,
        target_s=target_s,
        draft_s=drafting_s / NUM_DRAFTED,
    )


def _shared(index: int, base_len: int) -> dict[str, Any]:
    """The fields of a request for a sequence; which tokens it holds does not matter to its time."""
    return {
        "seq_id": str(index),
        "base_len": base_len,
        "new_tokens": (0,) * (CONTEXT_LEN - base_len),
        "prompt_len": CONTEXT_LEN,
        "sampling": SamplingParams(temperature=0.0),
    }


def median_times(actions: Sequence[Action], repeats: int, *, name: str) -> list[float]:
    """Median seconds of each, all taking turns; the first round does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for repeat in tqdm(range(repeats + 1), desc=name):
        for action, seen in zip(actions, times, strict=True):
            started = time.perf_counter()
            action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat > 0:
                seen.append(time.perf_counter() - started)
    return [median(seen) for seen in times]


def by_one_thread(action: Action) -> None:
    """Run it by one thread, as the app runs its drafter."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        action()
    finally:
        torch.set_num_threads(num_threads)


def format_table(rows: Sequence[EngineRow]) -> str:
    """The rows as a Markdown table, times in milliseconds."""
    columns: dict[str, Callable[[EngineRow], str]] = {
        "sequences": lambda row: str(row.num_sequences),
        "tokens each": lambda row: str(row.num_tokens),
        "matrix products ms": lambda row: f"{row.products_s * 1e3:.1f}",
        "transformers forward ms": lambda row: f"{row.transformers_s * 1e3:.1f}",
        "target step ms": lambda row: f"{row.target_s * 1e3:.1f}",
        "step / products": lambda row: f"{row.target_s / row.products_s:.2f}",
        "draft step ms": lambda row: f"{row.draft_s * 1e3:.2f}",
    }
    return markdown_table(columns, rows)


@torch.inference_mode()
def _products(model: nn.Module, num_tokens: int) -> Action:
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    inputs = {w.shape[1]: w.new_ones(num_tokens, w.shape[1]) for w in weights}
    return torch.inference_mode()(lambda: [F.linear(inputs[w.shape[1]], w) for w in weights])


@torch.inference_mode()
def _own_forward(model: PreTrainedModel, num_sequences: int, num_tokens: int) -> Action:
    tokens = torch.ones(num_sequences, num_tokens, dtype=torch.long, device=model.device)
    return torch.inference_mode()(lambda: model(input_ids=tokens, use_cache=False))
