"""How the bundled target learns to draft by its own first layer (`demo-early-exit`).

As LayerSkip does (Elhoushi et al. 2024, arXiv:2404.16710), the loss counts what final norm and head
make of an early layer too. What that has to guess is what the whole model says, so the whole is its
teacher.
"""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from cluster import bundled
from tandem.demo import training
from tandem.demo.corpus import Corpus, encode_documents
from tandem.demo.pair import greedy_agreement, save_model
from workers.first_layers import with_first_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitReport:
    """The result of a training run, written beside the weights as report.json."""

    command: str
    seed: int
    python: str
    torch: str
    num_steps: int
    early_exit_layer: int
    held_out_loss: float
    """Nats per token of the whole model on the held-out files."""
    early_held_out_loss: float
    """Nats per token of its first layers on the held-out files."""
    greedy_agreement: float
    """Share of the whole model's greedy tokens, continuing held-out prompts, that its first layers
    say after the same prefix."""


def train_early_exit(
    folder: Path, *, early_exit_layer: int, num_steps: int, seed: int, compile: bool, command: str
) -> EarlyExitReport:
    """Train the bundled target on and write it to `folder`."""
    source = bundled.resolve(bundled.TARGET_NAME)
    tokenizer = AutoTokenizer.from_pretrained(source)
    corpus, backend = Corpus.load(), tokenizer.backend_tokenizer
    tokens = encode_documents(backend, corpus.training, seed)
    held_out = encode_documents(backend, corpus.held_out, seed)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    early = with_first_layers(model, early_exit_layer)

    def loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
        return early_exit_loss(model, early, batch)

    def evaluate(model: PreTrainedModel, num_tokens: int | None = None) -> float:
        return training.held_out_loss(model, held_out[:num_tokens], window_len=512)

    options = training.TrainingOptions(
        num_steps=num_steps,
        learning_rate=3e-3,
        weight_decay=0.1,
        batch_tokens=2048,  # little is to be learnt, and that in many steps
        seed=seed,
        compile=compile,
    )
    training.train(model, tokens, loss, lambda _: evaluate(early, 2**13), options, "early exit")
    model = save_model(model, folder)
    tokenizer.save_pretrained(folder)
    early = with_first_layers(model, early_exit_layer)
    report = EarlyExitReport(
        command=command,
        seed=seed,
        python=platform.python_version(),
        torch=torch.__version__,
        num_steps=num_steps,
        early_exit_layer=early_exit_layer,
        held_out_loss=round(evaluate(model), 4),
        early_held_out_loss=round(evaluate(early), 4),
        greedy_agreement=round(greedy_agreement(model, early, backend, corpus), 4),
    )
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def early_exit_loss(model: PreTrainedModel, early: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Cross entropy of the text under the whole model, and of its law under its first layers.

    # [batch, length] -> []
    """
    with training.autocast():
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        early_logits = early(input_ids=tokens, use_cache=False).logits.float()
    text_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    law = logits.detach().flatten(0, 1).softmax(-1)
    return text_loss + F.cross_entropy(early_logits.flatten(0, 1), law)
