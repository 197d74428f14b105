"""Whether a draft's tokens mean the same to its target."""

from workers.errors import VocabularyMismatchError
from workers.model import load_config
from workers.model_source import AnyModel
from workers.tokenizer import find_tokenizer

ADVICE = (
    "Use a draft of the target's family, drafter=prompt_lookup or drafter=none; drafts with "
    "another tokenizer are not available yet"
)


def check_shared_vocabulary(target: AnyModel, draft: AnyModel) -> None:
    """Raise VocabularyMismatchError unless every id that both have is the same token to both.

    Embedding sizes may differ, as large models of a family pad theirs, and one may have tokens that
    the other lacks, as later models of a family do: the target never takes an id that it does not
    know, and a drafter runs a stand-in for one (see `step_inputs`).
    """
    target_tokens, draft_tokens = _load_vocabulary(target), _load_vocabulary(draft)
    if target_tokens is None or draft_tokens is None:
        _check_sizes(target, draft, lacking="target" if target_tokens is None else "draft")
        return
    conflict = _find_conflict(target_tokens, draft_tokens)
    if conflict is not None:
        raise VocabularyMismatchError(
            f"target {target!r} and draft {draft!r} have different vocabularies: {conflict}. "
            f"{ADVICE}"
        )


def _find_conflict(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """What the two say differently about the lowest such id, given token to id."""
    target_of = {token_id: token for token, token_id in target.items()}
    for token, token_id in sorted(draft.items(), key=lambda item: item[1]):
        known_as = target_of.get(token_id)
        if known_as is not None and known_as != token:
            return f"id {token_id} is {known_as!r} to the target and {token!r} to the draft"
        if target.get(token, token_id) != token_id:
            return f"{token!r} is id {target[token]} to the target and {token_id} to the draft"
    return None


def _check_sizes(target: AnyModel, draft: AnyModel, *, lacking: str) -> None:
    """Without both tokenizers, embeddings of one size are all that can be asked for."""
    target_size = load_config(target).get_text_config().vocab_size
    draft_size = load_config(draft).get_text_config().vocab_size
    if target_size != draft_size:
        raise VocabularyMismatchError(
            f"target {target!r} and draft {draft!r} have embeddings of {target_size} and "
            f"{draft_size} tokens, and the {lacking} has no tokenizer that would tell whether they "
            f"mean the same; put its tokenizer files beside its weights. {ADVICE}"
        )


def _load_vocabulary(name: AnyModel) -> dict[str, int] | None:
    """Token to id, or None for a model without a tokenizer."""
    tokenizer = find_tokenizer(name)
    if tokenizer is None:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
