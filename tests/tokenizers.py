"""Tokenizers of several kinds, made on the fly, and tiny models that have them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tandem.demo.retokenize import permuted
from tests.tiny_models import save_model, save_quick_model

TEXTS = (
    "the quick brown fox jumps over the lazy dog, and then the other one jumps too\n",
    "def read_config(path):\n    with open(path) as file:\n        return json.load(file)\n",
    "grün und größer: naïve cafés, 東京 and 京都, 🙂 and 🙃\n",
)
OTHER_TEXTS = (
    "then the fox reads another configuration, quickly, over and over\n",
    "class Reader:\n    def __init__(self, file):\n        self.file = file\n",
)


def byte_level(
    texts: Sequence[str] = TEXTS, *, vocab_size: int = 340, end: str = "<|end|>"
) -> Tokenizer:
    """A tokenizer like GPT-2's: a letter stands for each byte, and a special token ends texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentence_piece(texts: Sequence[str] = TEXTS, *, vocab_size: int = 420) -> Tokenizer:
    """A tokenizer like Llama 2's: words begin with a mark, bytes stand for what has no token."""
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=[], unk_token="<unk>", show_progress=False
    )
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(texts, trainer)
    words = [word for word in trained.get_vocab() if word != "<unk>"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    pieces += [(word, -10.0 + 0.5 * len(word)) for word in sorted(words)]
    tokenizer = Tokenizer(models.Unigram(pieces[:vocab_size], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def whole_words(texts: Sequence[str] = TEXTS) -> Tokenizer:
    """Words and signs as they stand, and one token for all others."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "other byte level": lambda: byte_level(OTHER_TEXTS, vocab_size=300, end="</s>"),
    "letters": lambda: byte_level(vocab_size=257),
    "sentence piece": sentence_piece,
    "words": whole_words,
}
SPECIAL = {
    "byte level": {"eos_token": "<|end|>"},
    "other byte level": {"eos_token": "</s>"},
    "letters": {"eos_token": "<|end|>"},
    "sentence piece": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "words": {"eos_token": "</s>", "unk_token": "<unk>"},
}


def wrapped(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of that kind as transformers has it."""
    return PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **SPECIAL[kind])


def save_speaking_model(
    folder: Path, kind: str, seed: int = 0, *, padding: int = 0, family: str | None = "llama"
) -> str:
    """Write a tiny model, the quickest where no family is named, with a tokenizer of that kind, and
    `padding` more embeddings than that needs."""
    tokenizer = wrapped(kind)
    changes = {"vocab_size": len(tokenizer) + padding, "eos_token_id": tokenizer.eos_token_id}
    if family is None:
        name = save_quick_model(folder, seed, **changes)
    else:
        name = save_model(folder, family, seed, **changes)
    tokenizer.save_pretrained(folder)
    return name


def save_permuted(source: str, folder: Path) -> str:
    """Write a model with a byte-level tokenizer anew, all tokens of which have other ids."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    size, old_ids = len(tokenizer), tokenizer.get_vocab()
    backend = permuted(tokenizer.backend_tokenizer, seed=0)
    by_new_id = [old_ids[backend.id_to_token(token)] for token in range(size)]
    with torch.no_grad():
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
            embedding.weight[:size] = embedding.weight[:size][by_new_id]
    end = backend.token_to_id(tokenizer.eos_token)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=tokenizer.eos_token
    ).save_pretrained(folder)
    return str(folder)
