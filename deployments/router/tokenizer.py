"""The target's tokenizer: reads prompts and writes text."""

from collections.abc import Mapping
from typing import Any, Protocol

from transformers import AutoTokenizer

from workers.errors import ModelNotFoundError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the router uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> Mapping[str, int]: ...


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer in a model's folder or under its id; raises ModelNotFoundError without one."""
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many libraries, such as one that is not installed
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelNotFoundError(
            f"target {name!r} has no tokenizer that can be loaded: {reason}; put its tokenizer "
            "files beside the weights"
        ) from error
    # The first call drops the truncation that a file may ask for. Several threads read prompts, and
    # one that changes the tokenizer while another uses it fails.
    loaded.encode("")
    tokenizer: Tokenizer = loaded
    return tokenizer
