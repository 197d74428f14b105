"""Step 3: tokens per second of the workers alone, beside transformers with the same weights."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from cluster import bundled
from tandem.decoding import GREEDY, SAMPLED, Decoder
from tandem.gpu_report.findings import Notebook
from tandem.gpu_report.subjects import (
    Subjects,
    as_transformers_runs_it,
    bundled_draft,
    choose_subjects,
    free_memory,
    grown_target,
    make_drafter,
    make_prompts,
    make_target,
    record_graphs,
)
from workers.drafters.model import ModelDrafter
from workers.sampling_params import SamplingParams

GAMMAS = (0, 4, 8)
ASSISTED = (4, 8)
NUM_LOOKUP_TOKENS = 10
"""The value of transformers' documentation."""
WARM_UP_TOKENS = 4
"""Tokens decoded before those that are timed: kernels are loaded when they are first used."""


def run(notebook: Notebook, *, is_small: bool) -> None:
    """Decode the same prompts in all ways, for each target: the most telling first."""
    subjects = choose_subjects(is_small=is_small)
    drafter = make_drafter(bundled_draft(subjects), subjects)
    record_graphs(subjects, drafter)
    for name in subjects.targets:
        if notebook.has_time(f"speed with the {name} target"):
            _run_target(notebook, subjects, name, drafter)
            free_memory(subjects)  # before the next, which is larger


def _run_target(notebook: Notebook, subjects: Subjects, name: str, drafter: ModelDrafter) -> None:
    model = grown_target(subjects, name)
    target = make_target(model, subjects)
    record_graphs(subjects, target)
    notebook.note(
        f"Target: {name}, draft: {bundled.DRAFT_NAME}, bf16, {subjects.num_texts_tokens} tokens a "
        f"text; graphs: target {'yes' if target.is_compiled else 'no'}, drafter "
        f"{'yes' if drafter.is_compiled else 'no'}."
    )
    decoder = Decoder(target, drafter)
    prompts = make_prompts(max(subjects.num_sequences))
    title = f"Tokens per second, {name} target"
    for num_streams in subjects.num_sequences:
        for way, sampling in (("greedy", GREEDY), ("temperature 0.8", SAMPLED)):
            for gamma in GAMMAS:
                if notebook.has_time(f"{name}: gamma {gamma}, {num_streams} streams, {way}"):
                    row = _decode(decoder, prompts[:num_streams], subjects, gamma, sampling)
                    notebook.add(title, {"who": "workers", "sampling": way, **row})
        with as_transformers_runs_it(model.module) as module:
            _generate_all(notebook, title, module, prompts[:num_streams], subjects)


def _decode(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    subjects: Subjects,
    gamma: int,
    sampling: SamplingParams,
) -> dict[str, Any]:
    num_tokens = subjects.num_texts_tokens
    decoder.decode(prompts, WARM_UP_TOKENS, gamma=gamma, sampling=sampling)
    decoder.num_drafted = decoder.num_accepted = 0
    started = time.perf_counter()
    decoder.decode(prompts, num_tokens, gamma=gamma, sampling=sampling)
    seconds = time.perf_counter() - started
    return {
        "how": f"gamma {gamma}",
        "streams": len(prompts),
        "tokens/s": num_tokens * len(prompts) / seconds,
        "accepted of drafted": decoder.num_accepted / max(1, decoder.num_drafted),
    }


def _generate_all(
    notebook: Notebook,
    title: str,
    module: PreTrainedModel,
    prompts: list[list[int]],
    subjects: Subjects,
) -> None:
    """`generate`, greedily: plain for any number of streams, with drafts for one."""
    ways: dict[str, dict[str, Any]] = {"generate": {}}
    if len(prompts) == 1:
        ways |= {f"assisted, {number} drafts": _assisted(subjects, number) for number in ASSISTED}
        ways["prompt lookup"] = {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}
    for way, options in ways.items():
        if not notebook.has_time(f"transformers: {way}, {len(prompts)} streams"):
            continue
        seconds = _generate(module, prompts, subjects.num_texts_tokens, options)
        notebook.add(
            title,
            {
                "who": "transformers",
                "sampling": "greedy",
                "how": way,
                "streams": len(prompts),
                "tokens/s": subjects.num_texts_tokens * len(prompts) / seconds,
            },
        )


def _assisted(subjects: Subjects, num_drafts: int) -> dict[str, Any]:
    """Options of `generate` for so many drafts in each round, whatever the draft thinks of them."""
    draft: Any = AutoModelForCausalLM.from_pretrained(
        bundled.resolve(bundled.DRAFT_NAME), dtype=torch.bfloat16, device_map={"": subjects.device}
    )
    draft.generation_config = GenerationConfig(
        **{
            **draft.generation_config.to_diff_dict(),
            "num_assistant_tokens": num_drafts,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
    )
    return {"assistant_model": draft}


@torch.inference_mode()
def _generate(
    module: PreTrainedModel, prompts: list[list[int]], num_tokens: int, options: dict[str, Any]
) -> float:
    """Seconds for one padded batch, the second time that it is generated."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=module.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=module.device
    )
    untyped: Any = module  # the annotations of `generate` do not cover the models that mix it in

    def generate(length: int) -> None:
        untyped.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            **options,
        )

    generate(WARM_UP_TOKENS)
    started = time.perf_counter()
    generate(num_tokens)
    if module.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
