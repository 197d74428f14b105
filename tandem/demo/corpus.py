"""The training text of the bundled pair: the Python standard library's own source."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

# Tests repeat themselves, vendored wheels are not the standard library, and the rest are tables of
# data in Python's syntax (code pages, the text of the language reference).
EXCLUDED_FOLDERS = frozenset(
    {
        "__pycache__",
        "encodings",
        "ensurepip",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One source file, named by its path below the standard library's folder."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether training must not see the file: decided by its name alone, so that every Python
        version and every process agrees."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return digest[0] % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The standard library's files, split by name into two parts."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @classmethod
    def load(cls, root: Path | None = None) -> "Corpus":
        """Read the files below `root`; by default the running interpreter's standard library."""
        documents = list(_read_documents(root or Path(sysconfig.get_paths()["stdlib"])))
        return cls(
            training=tuple(document for document in documents if not document.is_held_out),
            held_out=tuple(document for document in documents if document.is_held_out),
        )


def _read_documents(root: Path) -> Iterator[Document]:
    for path in sorted(_source_files(root)):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files are in another encoding on purpose
            continue
        if text.strip():
            yield Document(name=path.relative_to(root).as_posix(), text=text)


def _source_files(root: Path) -> Iterator[Path]:
    """Excluded folders are not even looked into: they hold twenty times as many files."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - EXCLUDED_FOLDERS
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def train_tokenizer(documents: tuple[Document, ...], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the training files; token 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode_documents(
    tokenizer: Tokenizer, documents: tuple[Document, ...], seed: int
) -> NDArray[np.int64]:
    """All files in one seeded order, each followed by the end-of-text token.  # [num_tokens]"""
    order = np.random.default_rng(seed).permutation(len(documents))
    encodings = tokenizer.encode_batch([documents[index].text for index in order])
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)])
    pieces = [piece for encoding in encodings for piece in (np.array(encoding.ids), end)]
    return np.concatenate(pieces).astype(np.int64)


def held_out_prompts(
    corpus: Corpus, num_prompts: int, seed: int = 0, num_characters: int = 400
) -> list[str]:
    """Seeded, distinct excerpts of held-out files, each starting at the beginning of a line."""
    rng = np.random.default_rng(seed)
    long_enough = [d for d in corpus.held_out if len(d.text) > 2 * num_characters]
    prompts: dict[str, None] = {}
    while len(prompts) < num_prompts:
        text = long_enough[rng.integers(len(long_enough))].text
        start = text.find("\n", int(rng.integers(len(text) - num_characters))) + 1
        if (prompt := text[start : start + num_characters]).strip():
            prompts[prompt] = None
    return list(prompts)
