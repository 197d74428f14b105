"""What transformers makes of the same weights, prompts and token counts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PLAIN = "generate"
LOOKUP = "prompt lookup"
BATCH_SIZE = 8
BATCH = f"generate, static batches of {BATCH_SIZE}"
ASSISTED = ("assisted, defaults", "assisted, 4 drafts", "assisted, 8 drafts")
NUM_LOOKUP_TOKENS = 10  # the value of its documentation
NUM_ASSISTANT_TOKENS = {"assisted, 4 drafts": 4, "assisted, 8 drafts": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """What transformers does in the same run, greedily; the median over the repeats."""

    text: str
    name: str
    tokens_per_s: float


class Baselines:
    """Greedy generation by transformers, in the checkpoint's own precision, in this process."""

    def __init__(self, target: str, draft: str | None) -> None:
        """Without a draft there are no assisted ways."""
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
        self._draft: Any = None
        if draft is not None:
            self._draft = AutoModelForCausalLM.from_pretrained(draft, dtype="auto").eval()
            self._draft_defaults = self._draft.generation_config

    @property
    def names(self) -> tuple[str, ...]:
        """The ways of generating."""
        return (PLAIN, *(ASSISTED if self._draft is not None else ()), LOOKUP, BATCH)

    def tokens_per_s(self, name: str, prompts: Sequence[str], max_tokens: int) -> float:
        started = time.perf_counter()
        num_tokens = self.generate(name, prompts, max_tokens)
        return num_tokens / (time.perf_counter() - started)

    def generate(self, name: str, prompts: Sequence[str], max_tokens: int) -> int:
        """One prompt after the other, or BATCH_SIZE at a time; returns how many tokens came."""
        size = BATCH_SIZE if name == BATCH else 1
        batches = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
        options = self._options(name)
        return sum(self._generate(batch, max_tokens, options) for batch in batches)

    def _options(self, name: str) -> dict[str, Any]:
        if name in (PLAIN, BATCH):
            return {}
        if name == LOOKUP:
            return {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}
        self._draft.generation_config = self._draft_defaults
        if name in NUM_ASSISTANT_TOKENS:
            self._draft.generation_config = GenerationConfig(
                **{
                    **self._draft_defaults.to_diff_dict(),
                    "num_assistant_tokens": NUM_ASSISTANT_TOKENS[name],
                    "num_assistant_tokens_schedule": "constant",
                    "assistant_confidence_threshold": 0.0,
                }
            )
        return {"assistant_model": self._draft}

    @torch.inference_mode()
    def _generate(self, prompts: list[str], max_tokens: int, options: dict[str, Any]) -> int:
        encoded = [self._tokenizer.encode(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        pad = self._target.generation_config.eos_token_id
        output = self._target.generate(
            input_ids=torch.tensor([[pad] * (longest - len(e)) + e for e in encoded]),
            attention_mask=torch.tensor([[0] * (longest - len(e)) + [1] * len(e) for e in encoded]),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=pad,
            **options,
        )
        return int((output.shape[1] - longest) * len(prompts))
