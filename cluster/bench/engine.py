"""`python -m cluster bench engine`: the workers alone, without Ray and without hops."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cluster.bench.report import environment, markdown_table, write_report
from cluster.demo import bundled
from cluster.demo.grow import grown_target
from workers.drafters.model import ModelDrafter, load_draft_model
from workers.model import load_model, resolve_device
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import ProposeRequest, SamplingParams, VerifyRequest

GREEDY = SamplingParams(temperature=0.0)
CONTEXT_LEN = 200
PROMPT = tuple(range(3, 3 + CONTEXT_LEN))
NUM_DRAFTED = 8
# (sequences, tokens each): single tokens, verifications, and batches of them
STEPS = ((1, 1), (1, 5), (1, 8), (8, 1), (8, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    target: str | None
    """None grows the bundled target to 287M parameters."""
    draft: str
    repeats: int
    """Timed steps of each kind, of which the median counts."""
    num_threads: int | None
    """Of the CPU; None leaves torch's default."""
    with_compile: bool
    output: Path


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


def run_engine_bench(options: EngineOptions) -> list[EngineRow]:
    """Measure all kinds of steps interleaved; write JSON and a table below `options.output`."""
    options.output.mkdir(parents=True, exist_ok=True)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    target_name = bundled.resolve(options.target or grown_target(options.output))
    plain = AutoModelForCausalLM.from_pretrained(
        target_name, dtype="auto", device_map={"": resolve_device("auto")}
    )
    cache = CacheOptions(max_num_seqs=max(num for num, _ in STEPS), max_model_len=2 * CONTEXT_LEN)
    target = Target(load_model(target_name), cache, max_batched_tokens=CONTEXT_LEN)
    drafter = ModelDrafter(load_draft_model(bundled.resolve(options.draft)), cache)
    if options.with_compile:
        target.start_compiling().join()
        with _one_thread():
            drafter.start_compiling().join()
    rows = []
    for num_sequences, num_tokens in STEPS:
        shape = (num_sequences, num_tokens)
        timed = _medians(
            [
                _products(plain, num_sequences * num_tokens),
                _own_forward(plain, *shape),
                _verification(target, *shape),
                _drafting(drafter, num_sequences),
            ],
            options.repeats,
        )
        rows.append(
            EngineRow(
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                products_s=timed[0],
                transformers_s=timed[1],
                target_s=timed[2],
                draft_s=timed[3] / NUM_DRAFTED,
            )
        )
    report = {
        **environment(),
        "options": {**asdict(options), "output": str(options.output), "target": target_name},
        "context_len": CONTEXT_LEN,
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, "engine", report, format_table(rows))
    return rows


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


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the app runs its drafter."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _medians(actions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median time of each, all taking turns; the first round does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for repeat in range(repeats + 1):
        for action, of_action in zip(actions, times, strict=True):
            started = time.perf_counter()
            action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat > 0:
                of_action.append(time.perf_counter() - started)
    return [median(of_action) for of_action in times]


def _products(model: nn.Module, num_tokens: int) -> Callable[[], object]:
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    inputs: dict[int, Tensor] = {
        weight.shape[1]: weight.new_ones(num_tokens, weight.shape[1]) for weight in weights
    }

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return run


def _own_forward(model: nn.Module, num_sequences: int, num_tokens: int) -> Callable[[], object]:
    device = next(model.parameters()).device
    tokens = torch.ones(num_sequences, num_tokens, dtype=torch.long, device=device)

    @torch.inference_mode()
    def run() -> None:
        model(input_ids=tokens, use_cache=False)

    return run


def _verification(target: Target, num_sequences: int, num_tokens: int) -> Callable[[], object]:
    """A verification that is repeated: the same committed token and drafts each time."""

    def request(seq_id: str, base_len: int, num_drafts: int) -> VerifyRequest:
        return VerifyRequest(
            seq_id=seq_id,
            base_len=base_len,
            new_tokens=PROMPT[base_len:],
            draft_tokens=(3,) * num_drafts,
            prompt_len=CONTEXT_LEN,
            sampling=GREEDY,
        )

    seq_ids = [str(index) for index in range(num_sequences)]
    target.release(seq_ids)
    target.verify([request(seq_id, 0, 0) for seq_id in seq_ids])
    batch = [request(seq_id, CONTEXT_LEN - 1, num_tokens - 1) for seq_id in seq_ids]
    return lambda: target.verify(batch)


def _drafting(drafter: ModelDrafter, num_sequences: int) -> Callable[[], object]:
    """The same, with drafts made anew each time."""

    def request(seq_id: str, base_len: int, k: int) -> ProposeRequest:
        return ProposeRequest(
            seq_id=seq_id,
            base_len=base_len,
            new_tokens=PROMPT[base_len:],
            k=k,
            prompt_len=CONTEXT_LEN,
            sampling=GREEDY,
        )

    seq_ids = [str(index) for index in range(num_sequences)]
    drafter.release(seq_ids)
    drafter.propose([request(seq_id, 0, 0) for seq_id in seq_ids])
    batch = [request(seq_id, CONTEXT_LEN - 1, NUM_DRAFTED) for seq_id in seq_ids]

    @_one_thread()
    def run() -> None:
        drafter.propose(batch)

    return run
