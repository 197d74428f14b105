"""The tokenizer of a model, for those who only ask it what its tokens are."""

from typing import Any

from transformers import AutoTokenizer


def find_tokenizer(name: str) -> Any | None:
    """The tokenizer in a model's folder or under its id; None where it has none that can be read.

    Prompts may come as token ids, so a model serves without one.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception:  # of many libraries, such as one that is not installed
        return None
