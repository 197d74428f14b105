"""Step 4: texts in bf16 that differ from plain decoding, each shown to begin at a near tie."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from cluster import bundled
from tandem.decoding import Decoder
from tandem.gpu_report.findings import Notebook
from tandem.gpu_report.subjects import (
    as_transformers_runs_it,
    bundled_draft,
    choose_subjects,
    grown_module,
    make_drafter,
    make_prompts,
    make_target,
    record_graphs,
)
from workers.model import make_model

GAMMAS = (0, 4, 8)
NUM_TEXTS = 16
NEAR_TIE = 0.25
"""Logits this close are a tie in bf16, where they are of order ten and a unit in the last place is
1/16; the checks use the same bound."""

Fork = tuple[list[int], int, int]
"""The tokens that two texts share, and the first that each has by itself."""


def run(notebook: Notebook, *, is_small: bool) -> None:
    """Decode texts one by one without drafts, and again in other ways."""
    subjects = choose_subjects(is_small=is_small)
    module = grown_module(subjects, next(iter(subjects.targets)))
    reference = deepcopy(module).float()
    model = make_model(bundled.resolve(bundled.TARGET_NAME), module)
    target, drafter = make_target(model, subjects), make_drafter(bundled_draft(subjects), subjects)
    record_graphs(subjects, target, drafter)
    decoder = Decoder(target, drafter)
    num_texts = min(NUM_TEXTS, 2 * max(subjects.num_sequences))
    prompts = make_prompts(num_texts)
    plain: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        if not notebook.has_time(f"differences of texts {index + 1} to {num_texts}"):
            break
        plain += decoder.decode([prompt], subjects.num_texts_tokens)
    all_gaps: list[float] = []
    for gamma in GAMMAS:
        for size in (1, len(plain)):
            title = f"gamma {gamma}, {size} at a time"
            if (gamma, size) == (0, 1) or not notebook.has_time(title):
                continue
            texts = [
                text
                for start in range(0, len(plain), size)
                for text in decoder.decode(
                    prompts[start : start + size][: len(plain) - start],
                    subjects.num_texts_tokens,
                    gamma=gamma,
                )
            ]
            gaps = logit_gaps(reference, find_forks(prompts, plain, texts))
            all_gaps += gaps
            notebook.add(
                "Texts that differ from plain decoding alone",
                {
                    "decoding": title,
                    "texts": len(texts),
                    "that differ": len(gaps),
                    "fp32 logit gaps there": ", ".join(f"{gap:.3f}" for gap in sorted(gaps)),
                },
            )
    if not all_gaps:
        notebook.note("No text differed.")
        return
    num_ties = sum(gap < NEAR_TIE for gap in all_gaps)
    notebook.note(
        f"{num_ties} of the {len(all_gaps)} differences begin where the logits of the two tokens "
        f"are less than {NEAR_TIE} apart, a few units in the last place of bf16."
    )


def find_forks(
    prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Fork]:
    """Where texts first differ from the plain ones; nothing for those that do not."""
    forks: list[Fork] = []
    for prompt, expected, text in zip(prompts, plain, texts, strict=False):
        for index, (one, other) in enumerate(zip(expected, text, strict=True)):
            if one != other:
                forks.append(([*prompt, *expected[:index]], one, other))
                break
    return forks


@torch.inference_mode()
def logit_gaps(reference: PreTrainedModel, forks: Sequence[Fork]) -> list[float]:
    """How far apart the logits of the two tokens are, by the same weights in fp32."""
    gaps = []
    with as_transformers_runs_it(reference) as module:
        for prefix, one, other in forks:
            tokens = torch.tensor([prefix], device=module.device)
            logits = module(input_ids=tokens, use_cache=False).logits[0, -1]
            gaps.append(float((logits[one] - logits[other]).abs()))
    return gaps
