"""Training loops of the bundled pair: the target on text, the draft on the target.

Both are deliberately plain: random windows of one token stream, Muon for the hidden matrices and
AdamW for the rest, one cosine decay, bf16 autocast where it pays. Everything random comes from one
seed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workers.cpu.packed_linear import has_kernels

MAX_MODEL_LEN = 4096
VOCAB_SIZE = 4096
WARM_UP = 0.03
# The last steps use long windows, so that positions far from the start are trained too.
LONG_WINDOWS_FROM = 0.85
NUM_EVALUATIONS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The length and the rate of training one model."""

    num_steps: int
    learning_rate: float
    weight_decay: float = 0.1
    batch_tokens: int = 8192
    window_len: int = 512
    long_window_len: int = 2048
    seed: int = 0
    compile: bool = True


def target_config() -> LlamaConfig:
    """About 4.0M parameters; every size is a quarter of the grown 287M model's."""
    return _llama_config(hidden_size=256, intermediate_size=704, num_layers=4, num_heads=4)


def draft_config() -> LlamaConfig:
    """About 1.0M parameters: two layers, since a draft step costs Python per layer."""
    return _llama_config(hidden_size=128, intermediate_size=448, num_layers=2, num_heads=4)


def _llama_config(
    *, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def autocast() -> torch.autocast:
    """Products in bf16, but for CPUs on which torch has no kernel for them.

    There (AVX2) a gradient's product takes up to 150 times what it takes in fp32.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_kernels())


def text_loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Next-token cross entropy of `tokens`.  # [batch, length] -> []"""
    with autocast():
        logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def distillation_loss(model: PreTrainedModel, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Cross entropy of the model under the target's law at every position (Hinton et al. 2015).

    Minimising it minimises KL(target || draft), which bounds the rejection probability TV(p, q)
    by Pinsker's inequality.  # [batch, length] -> []
    """
    with autocast():
        with torch.no_grad():
            target_logits = target(input_ids=tokens, use_cache=False).logits
        logits = model(input_ids=tokens, use_cache=False).logits
    target_probs = target_logits.flatten(0, 1).float().softmax(-1)
    return F.cross_entropy(logits.flatten(0, 1).float(), target_probs)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, tokens: NDArray[np.int64], window_len: int) -> float:
    """Mean next-token loss over consecutive windows, nats per token."""
    num_windows = len(tokens) // window_len
    windows = torch.from_numpy(tokens[: num_windows * window_len]).view(num_windows, window_len)
    losses = [text_loss(model, batch).item() * len(batch) for batch in windows.split(8)]
    return sum(losses) / num_windows


def train(
    model: LlamaForCausalLM,
    tokens: NDArray[np.int64],
    loss_of: Callable[[PreTrainedModel, Tensor], Tensor],
    evaluate: Callable[[PreTrainedModel], float],
    options: TrainingOptions,
    description: str,
) -> float:
    """Train `model` in place on random windows of `tokens`; returns the last evaluation.

    A progress bar shows the smoothed training loss, the last evaluation and the time left.
    """
    rng = np.random.default_rng(options.seed)
    optimizers = _make_optimizers(model, options)
    step_loss = torch.compile(loss_of, dynamic=False) if options.compile else loss_of
    evaluate_every = max(1, options.num_steps // NUM_EVALUATIONS)
    smoothed, evaluation = float("nan"), float("nan")
    bar = tqdm(range(options.num_steps), desc=description)
    for step in bar:
        progress = step / options.num_steps
        is_long = progress >= LONG_WINDOWS_FROM
        window_len = options.long_window_len if is_long else options.window_len
        batch = _random_windows(tokens, options.batch_tokens // window_len, window_len, rng)
        _set_learning_rate(optimizers, options.learning_rate * _schedule(progress))
        loss = step_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smoothed = loss.item() if step == 0 else 0.98 * smoothed + 0.02 * loss.item()
        if (step + 1) % evaluate_every == 0 or step + 1 == options.num_steps:
            evaluation = evaluate(model)
        bar.set_postfix(loss=f"{smoothed:.3f}", evaluation=f"{evaluation:.3f}", refresh=False)
    return evaluation


def _make_optimizers(
    model: LlamaForCausalLM, options: TrainingOptions
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices, AdamW for embeddings and norms (Jordan et al. 2024)."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    is_matrix = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in is_matrix]
    return (
        torch.optim.Muon(
            matrices,
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    )


def _set_learning_rate(optimizers: tuple[torch.optim.Optimizer, ...], learning_rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def _schedule(progress: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return float(0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * (progress - WARM_UP) / (1 - WARM_UP))))


def _random_windows(
    tokens: NDArray[np.int64], num_windows: int, window_len: int, rng: np.random.Generator
) -> Tensor:
    starts = rng.integers(len(tokens) - window_len, size=num_windows)
    return torch.from_numpy(np.stack([tokens[s : s + window_len] for s in starts]))
