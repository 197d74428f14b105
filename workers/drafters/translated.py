"""A draft model with another tokenizer than its target's.

It is asked and answers in the target's tokens, like any drafter; that its own are others nobody
else has to know.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from workers.drafters.draws import CONFIDENCE_DIGITS, Draft
from workers.drafters.histories import History
from workers.drafters.model import Drafting, ModelDrafter
from workers.drafters.translation import NO_TOKEN, Intersection, Retokenizing, Translation
from workers.end_tokens import find_end_tokens
from workers.errors import ContextLengthError
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_masks import GrammarText
from workers.model import Model
from workers.model_source import AnyModel
from workers.paged_model import CacheOptions
from workers.sampling import SamplingRow
from workers.scheduler import ScheduledRun
from workers.tokenizer import find_tokenizer
from workers.types import ProposeRequest, ProposeResult
from workers.vocabulary import DraftVocabulary


class TranslatedDrafter(ModelDrafter):
    """Keeps what is committed in both vocabularies, and has the model drafter work in its own.

    Requests are translated when they come, answers when they go; `base_len` and
    `needs_tokens_from` are in the target's tokens outside and in the draft's inside.
    """

    def __init__(
        self,
        model: Model,
        translation: Translation,
        cache: CacheOptions | None = None,
        *,
        max_batched_tokens: int = 512,
    ) -> None:
        self._translation = translation
        self._histories: dict[str, History] = {}
        columns = torch.tensor(translation.columns, device=model.device)
        self._columns = columns.clamp(min=0)
        missing = columns == NO_TOKEN
        self._missing = missing if bool(missing.any()) else None
        super().__init__(model, cache, max_batched_tokens=max_batched_tokens)

    def __len__(self) -> int:
        """Sequences whose tokens are kept."""
        return len(self._histories)

    def submit(self, request: ProposeRequest) -> list[ProposeResult]:
        """Accept a request in the target's tokens, as any worker does; tokens that are known here
        but gone from the cache are asked for again."""
        seq_id = request.seq_id
        results = self._give_up(seq_id)
        history = self._histories.get(seq_id) if seq_id in self._sequences else None
        num_known = 0 if history is None else len(history.given)
        if request.base_len > num_known:
            return [*results, ProposeResult(seq_id=seq_id, needs_tokens_from=num_known)]
        if history is None:
            history = self._histories[seq_id] = self._translation.begin()
        with self._isolated(seq_id):
            translated = self._translate(request, history)
            if translated.given_tokens or not request.new_tokens:
                results += super().submit(translated)
            else:  # nothing that the draft can say
                results.append(ProposeResult(seq_id=seq_id))
        return results + self._take_failed()

    def _check(self, request: ProposeRequest) -> None:
        try:
            super()._check(request)
        except ContextLengthError as error:
            raise ContextLengthError(f"{error}; these are the draft's tokens") from None

    def _translate(self, request: ProposeRequest, history: History) -> ProposeRequest:
        """The request in the draft's tokens."""
        if not request.new_tokens:
            return request
        num_unchanged = history.update(
            request.base_len, request.given_tokens, num_assumed=len(request.assumed_tokens)
        )
        draft = history.draft_tokens
        num_settled = self._num_settled(history)
        # the newest token is always run
        start = self._sequences.unchanged_len(
            request.seq_id, max(0, min(num_unchanged, num_settled - 1))
        )
        return replace(
            request,
            base_len=start,
            new_tokens=tuple(draft[start:num_settled]),
            assumed_tokens=tuple(draft[num_settled:]),
        )

    def _num_settled(self, history: History) -> int:
        """How many of the draft's tokens are told as committed: those of the committed text.

        With recurrent layers not its last ones, which may be cut anew with what follows: a state is
        kept behind what is committed, and one behind those would fit no other cut.
        """
        num_committed = max(1, history.draft_len(history.committed_len))
        num_settled = num_committed - history.num_unsettled
        return num_settled if self._paged.model.state_specs and num_settled > 1 else num_committed

    def release(self, seq_ids: Iterable[str]) -> list[ProposeResult]:
        seq_ids = list(seq_ids)
        released = super().release(seq_ids)
        for seq_id in seq_ids:
            self._histories.pop(seq_id, None)
        return released

    def _fail(self, seq_id: str, error: str, *, is_refused: bool = False) -> None:
        super()._fail(seq_id, error, is_refused=is_refused)
        self._histories.pop(seq_id, None)

    def unanswered(
        self,
        seq_id: str,
        *,
        needs_tokens_from: int | None = None,
        is_released: bool = False,
        error: str = "",
        is_refused: bool = False,
    ) -> ProposeResult:
        if needs_tokens_from:
            needs_tokens_from = self._histories[seq_id].num_said(needs_tokens_from)
        return super().unanswered(
            seq_id,
            needs_tokens_from=needs_tokens_from,
            is_released=is_released,
            error=error,
            is_refused=is_refused,
        )

    def start_loading_grammars(self) -> None:
        if self._translation.has_grammars:
            super().start_loading_grammars()

    def _make_grammar_compiler(self, model: Model) -> GrammarCompiler:  # noqa: ARG002
        """A compiler for the target's tokens, since a grammar is about those."""
        target, size = self._translation.target, self._translation.target_size
        return GrammarCompiler(
            lambda: find_tokenizer(target),
            vocab_size=size,
            end_tokens=find_end_tokens(target, size),
        )

    def _start(self, run: ScheduledRun[ProposeRequest]) -> Drafting:
        history = self._histories[run.sequence.seq_id]
        history.drafted.clear()
        return replace(super()._start(run), round_len=history.committed_len)

    def _scores(self, logits: Tensor) -> Tensor:
        """The logits in the translation's columns, -inf where the draft has no token."""
        scores = logits.index_select(-1, self._columns)
        return scores if self._missing is None else scores.masked_fill_(self._missing, -torch.inf)

    def _add(self, entry: Drafting, draft: Draft | None) -> None:
        if draft is not None:
            column = draft.token
            self._translation.note(self._histories[entry.sequence.seq_id].drafted, column)
            draft = replace(draft, token=self._translation.columns[column])
        super()._add(entry, draft)

    def _tells_law(self, request: ProposeRequest) -> bool:
        return super()._tells_law(request) and self._translation.has_laws

    def _sampling_row(self, entry: Drafting) -> SamplingRow:
        """What chooses the next draft. Where a rule compares laws and none can be told, that is the
        likeliest token, a draft without a choice."""
        request, history = entry.run.item.request, self._histories[entry.sequence.seq_id]
        is_certain = request.rule != "coupled" and not self._translation.has_laws
        return SamplingRow(
            params=replace(request.sampling, temperature=0.0) if is_certain else request.sampling,
            seed=request.seed,
            position=len(history.given) + len(history.drafted),
            history=history.tokens if request.sampling.needs_history else (),
            prompt_len=request.prompt_len,
            allowed=self._allowed(entry),
        )

    def _allowed(self, entry: Drafting) -> Tensor | None:
        return super()._allowed(entry) if self._translation.has_grammars else None

    def _text_of(self, entry: Drafting) -> GrammarText:
        return self._histories[entry.sequence.seq_id]

    def _answer(self, entry: Drafting) -> ProposeResult:
        result = super()._answer(entry)
        history = self._histories[result.seq_id]
        tokens, confidences = self._translation.answer(
            history, result.draft_tokens, result.confidences
        )
        k = entry.run.item.request.k
        return replace(
            result,
            draft_tokens=tuple(tokens[:k]),
            confidences=tuple(round(c, CONFIDENCE_DIGITS) for c in confidences[:k]),
        )


def make_drafter(
    model: Model,
    vocabulary: DraftVocabulary,
    cache: CacheOptions | None = None,
    *,
    target: AnyModel,
    max_batched_tokens: int = 512,
) -> ModelDrafter:
    """The drafter whose tokens become those of `target`, an id or folder, as `vocabulary` says."""
    if vocabulary.token_map is None:
        return ModelDrafter(model, cache, max_batched_tokens=max_batched_tokens)
    kind = Intersection if vocabulary.method == "intersection" else Retokenizing
    translation = kind(vocabulary.token_map, target=target)
    return TranslatedDrafter(model, translation, cache, max_batched_tokens=max_batched_tokens)
