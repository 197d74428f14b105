"""Whether two models speak the same tokens."""

from workers.errors import VocabularyMismatchError
from workers.model import load_config
from workers.tokenizer import find_tokenizer


def check_same_vocabulary(target: str, draft: str) -> None:
    """Raise VocabularyMismatchError unless draft tokens mean the same to the target.

    Embedding sizes alone may differ, as large models of a family pad theirs; tokens must not.
    """
    target_size = load_config(target).get_text_config().vocab_size
    draft_size = load_config(draft).get_text_config().vocab_size
    target_vocabulary, draft_vocabulary = _load_vocabulary(target), _load_vocabulary(draft)
    if target_vocabulary is None or draft_vocabulary is None:
        if target_size == draft_size:
            return
    elif target_vocabulary == draft_vocabulary:
        return
    else:
        target_size, draft_size = len(target_vocabulary), len(draft_vocabulary)
    difference = (
        f"{target_size} and {draft_size} tokens"
        if target_size != draft_size
        else f"{target_size} tokens each, but not the same ones"
    )
    raise VocabularyMismatchError(
        f"target {target!r} and draft {draft!r} have different vocabularies: {difference}. Use a "
        "draft of the target's family, or drafter=none; drafts with another tokenizer are not "
        "available yet"
    )


def _load_vocabulary(name: str) -> dict[str, int] | None:
    """Token to id, or None for a model without a tokenizer."""
    tokenizer = find_tokenizer(name)
    if tokenizer is None:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
