"""What the tokens of a vocabulary spell, in bytes: what vocabularies can be compared by.

Tokenizers write a space as `Ġ` or `▁` and a byte as `Ċ` or `<0x0A>`. In bytes a token is the same
whoever has it, and so is a part of a character.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from tokenizers import Tokenizer

from workers.errors import VocabularyMismatchError
from workers.model_source import AnyModel

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
NO_UTF_8 = re.compile("([\udc80-\udcff]+)")
"""Bytes that are no characters, as the error handler `surrogateescape` decodes them."""
ADD_SPACES = ("normalizer", "pre_tokenizer")
"""The parts of a tokenizer that may add a space before a text."""

Cut = list[tuple[int, int]]
"""Tokens of a text, and where in it each ends, in bytes."""


class Spelling:
    """The tokens of one tokenizer: those that spell something, and the special ones."""

    def __init__(self, name: AnyModel, tokenizer: Any) -> None:
        """Raises VocabularyMismatchError where the tokenizer does not say what its tokens spell."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise VocabularyMismatchError(
                f"the tokenizer of {name!r} does not say what its tokens spell; put its "
                "tokenizer.json beside its weights"
            )
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        read = _reader(backend)
        self.names: Mapping[int, str] = {
            token_id: token for token, token_id in backend.get_vocab().items()
        }
        self.special: Mapping[int, str] = {
            token_id: token.content for token_id, token in added.items() if token.special
        }
        """Tokens that are no text, and their names."""
        self.bytes_of: Mapping[int, bytes] = {
            token_id: token.encode() if token_id in added else read(token)
            for token_id, token in sorted(self.names.items())
            if token_id not in self.special
        }
        self.ids_of = self._ids_by_spelling()
        self._longest: dict[int, int] = {}
        """Bytes of the longest token that begins with each byte: few are as long as the longest of
        all, which may be a row of spaces."""
        for spelling in self.ids_of:
            self._longest[spelling[0]] = max(len(spelling), self._longest.get(spelling[0], 0))

    def _ids_by_spelling(self) -> Mapping[bytes, list[int]]:
        """Tokens by what they spell; those that stand for a byte come last."""
        found: dict[bytes, list[int]] = {}
        in_order = sorted(
            self.bytes_of, key=lambda token: bool(BYTE_TOKEN.match(self.names[token]))
        )
        for token in in_order:
            if self.bytes_of[token]:
                found.setdefault(self.bytes_of[token], []).append(token)
        return found

    def cut(self, text: bytes, start: int = 0) -> Cut:
        """Cut a text into the longest tokens, from its beginning on; bytes that no token spells are
        left out. The first byte is the one at `start`."""
        found, position = [], 0
        while position < len(text):
            longest = self._longest.get(text[position], 0)
            for length in range(min(longest, len(text) - position), 0, -1):
                tokens = self.ids_of.get(text[position : position + length])
                if tokens is not None:
                    found.append((tokens[0], start + position + length))
                    break
            else:
                length = 1
            position += length
        return found


class Encoder:
    """Cuts text as a tokenizer does, and says where; text never becomes a special token."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        content = json.loads(spelling.backend.to_str())
        within = content | {part: _without_space(content[part]) for part in ADD_SPACES}
        self._at_start = _for_text(content)
        self._within = _for_text(within) if within != content else self._at_start

    def encode(self, text: bytes, start: int = 0, *, is_beginning: bool = True) -> Cut:
        """The tokens of a text whose first byte is the one at `start`.

        They spell the text, but for bytes that no token has, and for a space before a beginning
        without one, as many tokenizers add it.
        """
        tokenizer = self._at_start if is_beginning and text[:1] != b" " else self._within
        found: Cut = []
        for part in NO_UTF_8.split(text.decode("utf-8", "surrogateescape")):
            raw = part.encode("utf-8", "surrogateescape")
            if NO_UTF_8.match(part):
                found += self._spelling.cut(raw, start)
            else:
                found += self._encode(tokenizer, part, raw, start)
            if part:
                tokenizer = self._within
            start += len(raw)
        return found

    def _encode(self, tokenizer: Tokenizer, text: str, raw: bytes, start: int) -> Cut:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        spelt = [self._spelling.bytes_of.get(token, b"") for token in encoding.ids]
        num_added = int(not raw.startswith(b" ") and b"".join(spelt[:1]).startswith(b" "))
        raw = b" " * num_added + raw
        if b"".join(spelt) == raw:
            lens = accumulate(map(len, spelt))
            found = [*zip(encoding.ids, lens, strict=True)]
        else:  # normalised, or of unknown words
            places = [*accumulate((len(letter.encode()) for letter in text), initial=num_added)]
            begins = [places[first] for first, _ in encoding.offsets]
            found = self._where_they_agree(raw, encoding.ids, spelt, begins)
        start -= num_added
        return [(token, start + end) for token, end in found if end > num_added]

    def _where_they_agree(
        self, raw: bytes, tokens: Sequence[int], spelt: Sequence[bytes], begins: Sequence[int]
    ) -> Cut:
        """The tokens that spell what stands where they begin, and between them the longest that do:
        so what is odd about a word stays with it, and the tokenizer is asked once.

        Args:
            begins: where in the text the tokenizer says that each begins, in bytes.
        """
        found: Cut = []
        done = 0
        for token, spelling, begin in zip(tokens, spelt, begins, strict=True):
            # some count a space to the token behind it, and some do not
            for place in (done, begin, begin - 1):
                if place >= done and spelling and raw.startswith(spelling, place):
                    found += self._spelling.cut(raw[done:place], done)
                    done = place + len(spelling)
                    found.append((token, done))
                    break
        return found + self._spelling.cut(raw[done:], done)


def _for_text(content: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer by its file's content, to which all is text, names of special tokens too."""
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_space(part: Any) -> Any:
    """A part of a tokenizer that adds no space before a text."""
    if isinstance(part, list):
        return [_without_space(each) for each in part if each["type"] != "Prepend"]
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
        case {"type": "Sequence"}:
            lists = {name: value for name, value in part.items() if name != "type"}
            return part | {name: _without_space(value) for name, value in lists.items()}
    return part


def _reader(backend: Tokenizer) -> Any:
    """What turns a token into its bytes, as the tokenizer's decoder would."""
    decoders = {part["type"]: part for part in _decoders(backend)}
    if "ByteLevel" in decoders:
        return _read_byte_level
    if "WordPiece" in decoders:
        prefix = decoders["WordPiece"].get("prefix", "##")
        return lambda token: (
            token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
        ).encode()
    if "BPEDecoder" in decoders:
        suffix = decoders["BPEDecoder"].get("suffix", "</w>")
        return lambda token: token.replace(suffix, " ").encode()
    if not decoders:  # tokens are words, which are joined by spaces
        return lambda token: f" {token}".encode()
    space = decoders.get("Metaspace", {}).get("replacement", "▁")
    return lambda token: _read_words(token, space)


def _decoders(backend: Tokenizer) -> Iterable[dict[str, Any]]:
    """The parts of the decoder, one after another."""
    if backend.decoder is None:
        return ()
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else (state,)


def _read_words(token: str, space: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()


def _read_byte_level(token: str) -> bytes:
    if not all(character in BYTES for character in token):
        return token.encode()
    return bytes(BYTES[character] for character in token)


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for, as GPT-2 has chosen them:
    printable ones stand for themselves, the others have the letters from 256 on, in order."""
    printable = {*chain(range(33, 127), range(161, 173), range(174, 256))}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTES = _byte_letters()
