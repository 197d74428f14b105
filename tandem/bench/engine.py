"""`tandem bench engine`: the workers alone, without Ray and without hops."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tandem.bench.report import environment, markdown_table, shown_options, write_report
from tandem.bench.steps import (
    Context,
    EngineOptions,
    compile_workers,
    drafting,
    load_models,
    make_context,
    make_drafter,
    make_target,
    median_times,
    verification,
)
from workers.drafters.model import ModelDrafter
from workers.target import Target

CONTEXT_LEN = 200
NUM_DRAFTED = 8
# (sequences, tokens each): single tokens, verifications, and batches of them
STEPS = ((1, 1), (1, 5), (1, 8), (8, 1), (8, 5), (16, 1), (16, 2), (16, 3))


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
    """Measure the kinds of steps of each size in turns; write JSON and a table."""
    target_model, draft_model = load_models(options)
    plain = AutoModelForCausalLM.from_pretrained(
        target_model.name, dtype="auto", device_map={"": target_model.device}
    )
    vocab_size = min(target_model.vocab_size, draft_model.vocab_size)
    contexts = [
        make_context(str(index), CONTEXT_LEN, room=NUM_DRAFTED, vocab_size=vocab_size)
        for index in range(max(num_sequences for num_sequences, _ in STEPS))
    ]
    target = make_target(target_model, contexts)
    drafter = make_drafter(draft_model, contexts)
    if options.with_compile:
        compile_workers(target, drafter)
    rows = [
        _measure(plain, target, drafter, contexts[:num_sequences], num_tokens, options.repeats)
        for num_sequences, num_tokens in STEPS
    ]
    report = {
        **environment(),
        "options": shown_options(asdict(options), target=target_model.name),
        "context_len": CONTEXT_LEN,
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, "engine", report, format_table(rows))
    return rows


def _measure(
    plain: nn.Module,
    target: Target,
    drafter: ModelDrafter,
    contexts: Sequence[Context],
    num_tokens: int,
    repeats: int,
) -> EngineRow:
    products_s, transformers_s, target_s, drafting_s = median_times(
        [
            _products(plain, len(contexts) * num_tokens),
            _own_forward(plain, len(contexts), num_tokens),
            verification(target, contexts, num_tokens),
            drafting(drafter, contexts, NUM_DRAFTED),
        ],
        repeats,
        name=f"{len(contexts)} x {num_tokens}",
    )
    return EngineRow(
        num_sequences=len(contexts),
        num_tokens=num_tokens,
        products_s=products_s,
        transformers_s=transformers_s,
        target_s=target_s,
        draft_s=drafting_s / NUM_DRAFTED,
    )


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
