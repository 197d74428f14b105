"""The target's tokenizer, which the router needs to read prompts and write text."""

from typing import Any

from transformers import AutoTokenizer

from deployments.router.prompts import Tokenizer
from workers.errors import ModelNotFoundError


def load_tokenizer(name: str) -> Tokenizer:
    """Raises ModelNotFoundError for a model without a tokenizer."""
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
