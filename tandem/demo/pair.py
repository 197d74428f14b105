"""How the bundled pair is made (`demo-train`), and what it came to."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tandem.demo import training
from tandem.demo.corpus import (
    END_OF_TEXT,
    Corpus,
    encode_documents,
    held_out_prompts,
    train_tokenizer,
)

NUM_PROMPT_TOKENS = 32
NUM_CONTINUATION_BATCHES = 40
CONTINUATION_BATCH_SIZE = 64
NUM_AGREEMENT_PROMPTS = 64
NUM_AGREEMENT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """The result of a training run, written beside the weights as report.json."""

    command: str
    seed: int
    python: str
    torch: str
    num_training_tokens: int
    num_target_parameters: int
    num_draft_parameters: int
    target_steps: int
    draft_steps: int
    target_held_out_loss: float
    """Nats per token on the held-out files."""
    draft_held_out_loss: float
    greedy_agreement: float
    """Share of the target's own greedy tokens, continuing held-out prompts, that the draft's
    argmax repeats when it is given the same prefix."""


def train_pair(
    folder: Path, *, target_steps: int, draft_steps: int, seed: int, compile: bool, command: str
) -> PairReport:
    """Train tokenizer, target and draft on the standard library and write them below `folder`."""
    corpus = Corpus.load()
    tokenizer = train_tokenizer(corpus.training, training.VOCAB_SIZE)
    tokens = encode_documents(tokenizer, corpus.training, seed)
    held_out = encode_documents(tokenizer, corpus.held_out, seed)

    def evaluate(model: PreTrainedModel) -> float:
        return training.held_out_loss(model, held_out, window_len=512)

    torch.manual_seed(seed)
    target = LlamaForCausalLM(training.target_config())
    options = training.TrainingOptions(
        num_steps=target_steps,
        learning_rate=6e-3,
        weight_decay=0.4,  # a dozen epochs of little text: less memorises it
        seed=seed,
        compile=compile,
    )
    training.train(target, tokens, training.text_loss, evaluate, options, "target")
    target = save_model(target, folder / "target")
    save_tokenizer(tokenizer, folder / "target")

    continuations = generate_continuations(target, tokens, seed=seed)

    def distil(model: PreTrainedModel, batch: Tensor) -> Tensor:
        return training.distillation_loss(model, target, batch)

    draft = LlamaForCausalLM(training.draft_config())
    options = training.TrainingOptions(
        num_steps=draft_steps,
        learning_rate=8e-3,
        weight_decay=0.02,
        seed=seed + 1,
        compile=compile,
    )
    both = np.concatenate([tokens, continuations])
    training.train(draft, both, distil, evaluate, options, "draft")
    draft = save_model(draft, folder / "draft")

    report = PairReport(
        command=command,
        seed=seed,
        python=platform.python_version(),
        torch=torch.__version__,
        num_training_tokens=len(tokens),
        num_target_parameters=target.num_parameters(),
        num_draft_parameters=draft.num_parameters(),
        target_steps=target_steps,
        draft_steps=draft_steps,
        target_held_out_loss=round(evaluate(target), 4),
        draft_held_out_loss=round(evaluate(draft), 4),
        greedy_agreement=round(greedy_agreement(target, draft, tokenizer, corpus), 4),
    )
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


@torch.no_grad()
def generate_continuations(
    target: LlamaForCausalLM, tokens: NDArray[np.int64], *, seed: int
) -> NDArray[np.int64]:
    """The target's own text, half of it greedy and half sampled, for the draft to learn from.

    A draft distilled on the corpus alone never sees what the target writes after its own
    mistakes, which is what it has to guess when serving (on-policy data, arXiv:2306.13649).
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    generated = []
    for index in tqdm(range(NUM_CONTINUATION_BATCHES), desc="continuations"):
        starts = rng.integers(len(tokens) - NUM_PROMPT_TOKENS, size=CONTINUATION_BATCH_SIZE)
        prompts = np.stack([tokens[s : s + NUM_PROMPT_TOKENS] for s in starts])
        with training.autocast():
            output = _generate(
                target,
                torch.from_numpy(prompts),
                max_new_tokens=512 - NUM_PROMPT_TOKENS,
                temperature=0.8 if index % 2 == 1 else 0.0,
            )
        end = target.config.eos_token_id
        for row in output.numpy():  # rows that ended early are padded with the end token
            generated.append(row[: (np.argmax(row == end) + 1) if end in row else None])
    return np.concatenate(generated)


@torch.no_grad()
def greedy_agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus
) -> float:
    """See `PairReport.greedy_agreement`; both models in fp32."""
    num_agreed, num_tokens = 0, 0
    for prompt in held_out_prompts(corpus, NUM_AGREEMENT_PROMPTS):
        prompt_ids = torch.tensor([tokenizer.encode(prompt).ids])
        output = _generate(target, prompt_ids, max_new_tokens=NUM_AGREEMENT_TOKENS, temperature=0.0)
        guesses = draft(input_ids=output[:, :-1], use_cache=False).logits.argmax(-1)
        first = prompt_ids.shape[1] - 1
        num_agreed += int((guesses[:, first:] == output[:, first + 1 :]).sum())
        num_tokens += output.shape[1] - prompt_ids.shape[1]
    return num_agreed / num_tokens


def _generate(
    model: LlamaForCausalLM, prompts: Tensor, *, max_new_tokens: int, temperature: float
) -> Tensor:
    """Prompts and their continuations, padded with the end token.  # [batch, length]"""
    untyped: Any = model  # the annotations of `generate` do not cover the models that mix it in
    output: Tensor = untyped.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
    )
    return output


def save_model(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Write bf16 weights; return the model as anybody will load it, in fp32."""
    bf16: Any = model.to(torch.bfloat16)  # type: ignore[arg-type]
    bf16.save_pretrained(folder)
    saved: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return saved


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    make_tokenizer: Any = PreTrainedTokenizerFast
    make_tokenizer(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=training.MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
