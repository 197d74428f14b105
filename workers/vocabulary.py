"""Whether a draft's tokens mean the same to its target, and what can be done if they do not."""

from dataclasses import dataclass
from typing import Any, Literal

from workers.errors import VocabularyMismatchError
from workers.model import load_config
from workers.model_source import AnyModel
from workers.spelling import Spelling
from workers.token_map import TokenMap
from workers.tokenizer import find_tokenizer
from workers.types import HeterogeneousVocab

Method = Literal["direct", "intersection", "retokenize"]

LARGE_SHARE = 0.5
"""How much of each vocabulary the other must have where `auto` does not go by the text."""
SMALL_SHARE = 0.1
"""How much of the target's an intersection must have: less is little but single letters."""
ADVICE = "use a draft of the target's family, drafter=prompt_lookup or drafter=none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """How a draft's tokens become its target's."""

    method: Method
    token_map: TokenMap | None = None
    """The map between the tokens of both; None where they are the same."""

    @property
    def description(self) -> str:
        """A clause for the log; empty where the tokens are the same."""
        if self.token_map is None:
            return ""
        return (
            f"its tokens are others, so heterogeneous_vocab={self.method}: it has "
            f"{self.token_map.share_of_target:.0%} of the target's, and the target "
            f"{self.token_map.share_of_draft:.0%} of its"
        )


def compare_vocabularies(
    target: AnyModel, draft: AnyModel, wanted: HeterogeneousVocab = "auto"
) -> DraftVocabulary:
    """Find out how a draft can serve a target, given the ids or folders of both.

    With `auto`, tokens are taken as they are where every id that both have is the same token to
    both, those aside that were added to both vocabularies, and these are at least LARGE_SHARE of
    each. Embedding sizes may differ, as large models of a family pad theirs, and one may have
    tokens that the other lacks, as later models of a family do: the target never takes an id that
    it does not know, and a drafter runs a stand-in for one (see `step_inputs`). Else the
    intersection is taken where it has at least LARGE_SHARE of both vocabularies, and where it has
    not, texts are tokenized again.

    Raises VocabularyMismatchError where the tokens cannot be compared, and for an intersection of
    hardly any tokens.
    """
    tokenizers = {target: find_tokenizer(target), draft: find_tokenizer(draft)}
    for role, name in (("target", target), ("draft", draft)):
        if tokenizers[name] is None:
            _check_without_tokenizer(target, draft, lacking=role, wanted=wanted)
            return DraftVocabulary(method="direct")
    if wanted == "auto" and _agree(tokenizers[target], tokenizers[draft]):
        return DraftVocabulary(method="direct")
    token_map = TokenMap(
        Spelling(target, tokenizers[target]),
        Spelling(draft, tokenizers[draft]),
        target_tokenizer=tokenizers[target],
        draft_tokenizer=tokenizers[draft],
        target_size=_size(target),
        draft_size=_size(draft),
    )
    method = _method(wanted, token_map)
    if method == "intersection" and token_map.share_of_target < SMALL_SHARE:
        raise VocabularyMismatchError(
            f"draft {draft!r} has only {token_map.share_of_target:.1%} of the tokens of target "
            f"{target!r}, too few for heterogeneous_vocab=intersection; use "
            "heterogeneous_vocab=retokenize"
        )
    return DraftVocabulary(method=method, token_map=token_map)


def _method(wanted: HeterogeneousVocab, token_map: TokenMap) -> Method:
    if wanted != "auto":
        return wanted
    share = min(token_map.share_of_target, token_map.share_of_draft)
    return "intersection" if share >= LARGE_SHARE else "retokenize"


def _agree(target: Any, draft: Any) -> bool:
    """Whether the two tokenizers have much in common, and differ in no id or token but such as were
    added to both."""
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    num_common = len(target_ids.keys() & draft_ids.keys())
    if num_common < LARGE_SHARE * max(len(target_ids), len(draft_ids)):
        return False
    target_names = {token_id: token for token, token_id in target_ids.items()}
    target_added, draft_added = _added(target), _added(draft)
    for token, token_id in draft_ids.items():
        known_as = target_names.get(token_id, token)
        are_added = known_as in target_added and token in draft_added
        if known_as != token and not are_added:
            return False
        is_moved = target_ids.get(token, token_id) != token_id
        if is_moved and not (token in target_added and token in draft_added):
            return False
    return True


def _added(tokenizer: Any) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values()}


def _check_without_tokenizer(
    target: AnyModel, draft: AnyModel, *, lacking: str, wanted: HeterogeneousVocab
) -> None:
    """Without both tokenizers, embeddings of one size are all that can be asked for."""
    fix = f"put its tokenizer files beside its weights, or {ADVICE}"
    if wanted != "auto":
        raise VocabularyMismatchError(
            f"heterogeneous_vocab is {wanted!r}, but the {lacking} has no tokenizer that can be "
            f"loaded, of target {target!r} and draft {draft!r}; {fix}"
        )
    if _size(target) != _size(draft):
        raise VocabularyMismatchError(
            f"target {target!r} and draft {draft!r} have embeddings of {_size(target)} and "
            f"{_size(draft)} tokens, and the {lacking} has no tokenizer that would tell whether "
            f"they mean the same; {fix}"
        )


def _size(name: AnyModel) -> int:
    return int(load_config(name).get_text_config().vocab_size)
