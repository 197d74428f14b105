"""The tokenizer of a model, for those who only ask it what its tokens are."""

from typing import Any

from transformers import AutoTokenizer

from workers.model_source import AnyModel, ModelSource


def find_tokenizer(name: AnyModel) -> Any | None:
    """The tokenizer in a model's folder or under its id; None where it has none that can be read.

    Prompts may come as token ids, so a model serves without one.
    """
    source = ModelSource.of(name)
    try:
        return AutoTokenizer.from_pretrained(source.name, **source.hub_options)
    except Exception:  # of many libraries, such as one that is not installed
        return None
