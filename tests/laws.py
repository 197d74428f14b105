"""The law of short texts of few tokens, and whether texts that were written have it.

Texts are of three tokens only, so that each way in which three of them follow each other is
frequent enough to be counted.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from tests.goodness_of_fit import chisquare_pvalue
from workers.sampling import SamplingRow, process_logits
from workers.sampling_params import SamplingParams

Text = tuple[int, ...]

TEXT_LEN = 6
COUNTED = slice(2, 5)
"""The tokens whose joint law is compared: of two rounds or more."""


def only(
    letters: Sequence[int], *, temperature: float = 3.0, presence_penalty: float = 0.3
) -> SamplingParams:
    """Parameters that leave no other tokens, and these about equally likely."""
    return SamplingParams(
        temperature=temperature,
        presence_penalty=presence_penalty,
        logit_bias=tuple((letter, 90.0) for letter in letters),
    )


def law_of_texts(name: str, prompt: Text, params: SamplingParams) -> dict[Text, float]:
    """The law of texts by transformers' own forward and the definition of the parameters."""
    module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    letters = [letter for letter, _ in params.logit_bias]
    texts: dict[Text, float] = {(): 1.0}
    for length in range(TEXT_LEN):
        with torch.inference_mode():
            logits = module(torch.tensor([prompt + text for text in texts])).logits[:, -1]
        rows = [
            SamplingRow(
                params=params,
                seed=0,
                position=len(prompt) + length,
                history=prompt + text,
                prompt_len=len(prompt),
            )
            for text in texts
        ]
        law = process_logits(logits, rows).double().softmax(-1)
        texts = {
            (*text, letter): probability * float(row[letter])
            for (text, probability), row in zip(texts.items(), law, strict=True)
            for letter in letters
        }
    return texts


def pvalue(texts: Sequence[Text], law: dict[Text, float]) -> float:
    """The p-value of a chi-square test of the counted tokens, as they follow each other."""
    counts = Counter(text[COUNTED] for text in texts)
    expected: Counter[Text] = Counter()
    for text, probability in law.items():
        expected[text[COUNTED]] += probability * len(texts)
    assert len(expected) == 27
    assert min(expected.values()) > 5
    return chisquare_pvalue([counts[way] for way in expected], list(expected.values()))
