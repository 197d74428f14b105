"""The target's tokenizer: reads prompts and writes text."""

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import AutoTokenizer

from workers.errors import ModelNotFoundError
from workers.model_source import AnyModel, ModelSource

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the router uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def get_vocab(self) -> Mapping[str, int]: ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that applies chat templates too."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None: ...

    @property
    def all_special_tokens(self) -> Sequence[str]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


def load_tokenizer(name: AnyModel) -> ChatTokenizer:
    """The tokenizer in a model's folder or under its id; raises ModelNotFoundError without one."""
    source = ModelSource.of(name)
    try:
        loaded: Any = AutoTokenizer.from_pretrained(source.name, **source.hub_options)
    except Exception as error:  # of many libraries, such as one that is not installed
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelNotFoundError(
            f"target {name!r} has no tokenizer that can be loaded: {reason}; put its tokenizer "
            "files beside the weights"
        ) from error
    # The first call drops the truncation that a file may ask for. Several threads read prompts, and
    # one that changes the tokenizer while another uses it fails.
    loaded.encode("")
    # Requests are held to the model's context, by `PromptReader` and by their router. Of texts that
    # are longer than the file says, the tokenizer would only warn.
    loaded.model_max_length = sys.maxsize
    tokenizer: ChatTokenizer = loaded
    return tokenizer


def without_special_names(tokenizer: Tokenizer) -> Tokenizer:
    """A copy to which the name of a special token is a text like any other."""
    twin: Any = copy.deepcopy(tokenizer)
    twin.split_special_tokens = True
    twin.encode("")  # this, too, changes a tokenizer at its first call only
    changed: Tokenizer = twin
    return changed


class TokenNames:
    """The text of each token by itself, as log-probabilities name it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # such vocabularies mark a word's beginning, which is lost where the word stands alone
        self._beginnings = {
            token for name, token in tokenizer.get_vocab().items() if name.startswith(WORD_START)
        }
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """The token's text; part of a character shows as replacement characters."""
        name = self._names.get(token_id)
        if name is None:
            name = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if token_id in self._beginnings and not name.startswith(" "):
                name = f" {name}"
            self._names[token_id] = name
        return name
