"""Predicted outputs: what the client expects most of the completion to be.

Whoever has a file edited knows most of the answer: the file. The prediction is drafted from where
the text goes on in it. Where the text departs from it, one token is first taken to stand in place
of another; then the last tokens are looked for behind the place that was last sure, as an editor
compares two versions of a file.
"""

from dataclasses import dataclass, field

from deployments.router.drafting.accuracy import Guess, MatchAccuracy, is_sure
from deployments.router.drafting.lookup import MAX_PLACES, Match, PlaceIndex, match_length
from deployments.router.sequence import Sequence
from workers.types import NO_DRAFTS, DraftTokens

SOURCE = "predicted"
SURE_LEN = 4
"""The number of tokens in a row that no two places have in common by chance."""
NEAR = 8
"""How many tokens behind a change a single token still tells the place, and how many tokens may
stand in place of as many others."""
WINDOW = 256
"""How far behind the place that was last sure is looked first, in tokens."""


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Where a text goes on in its prediction."""

    prediction: list[int]
    text_len: int
    """Tokens of the text that were compared, those of the prompt included."""
    position: int = 0
    """The token of the prediction that is expected next."""
    match_len: int = 0
    """How many tokens before that place are the last ones of the text."""
    last_sure: int = 0
    """The last place in the prediction up to which SURE_LEN tokens or more agreed."""
    num_missed: int = 0
    """Tokens since the text departed from the prediction."""
    index: PlaceIndex = field(default_factory=PlaceIndex)

    def guesses(self, num_tokens: int) -> list[Guess]:
        """What the prediction says comes next."""
        if self.num_missed > NEAR:
            return []
        expected = self.prediction[self.position : self.position + num_tokens]
        return [Guess(token, self.match_len + index) for index, token in enumerate(expected)]

    def follow(self, text: list[int]) -> None:
        """Find the place again after tokens were committed."""
        for token in text[self.text_len :]:
            self._step(token)
        self.text_len = len(text)
        if self.num_missed:
            self._realign(text)

    def _step(self, token: int) -> None:
        if self.prediction[self.position : self.position + 1] == [token]:
            self.match_len += 1
            self.num_missed = 0
        else:
            if self.match_len >= SURE_LEN:
                self.last_sure = self.position
            self.match_len = 0
            self.num_missed += 1
        self.position += 1

    def _realign(self, text: list[int]) -> None:
        match = self._find_behind(text)
        if match is None or (match.length == 1 and match.position >= self.last_sure + NEAR):
            self.index.extend(self.prediction)
            match = self.index.find_in(self.prediction, text)
            if match is None or match.length < SURE_LEN:
                return
        self.position, self.match_len = match.position + 1, match.length
        self.num_missed = 0

    def _find_behind(self, text: list[int]) -> Match | None:
        """The longest match of the text's end behind the last sure place; of equals the nearest."""
        best: Match | None = None
        place, end = self.last_sure - 1, self.last_sure + WINDOW
        for _ in range(MAX_PLACES):
            try:
                place = self.prediction.index(text[-1], place + 1, end)
            except ValueError:
                break
            longest = 0 if best is None else best.length
            length = match_length(self.prediction, place, text, more_than=longest)
            if length > longest:
                best = Match(position=place, length=length)
        return best


class PredictedOutput:
    """Drafts for any number of sequences by their predictions; silent for those without."""

    source = SOURCE

    def __init__(self, *, is_last: bool = True) -> None:
        """Unless it is the last drafter or the request's own, it is silent where it is not
        sure."""
        self._is_last = is_last
        self._readers: dict[str, _Reader] = {}
        self._accuracy = MatchAccuracy(head_start=1)

    def __len__(self) -> int:
        """Sequences of which something is kept."""
        return len(self._readers)

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        if not sequence.params.prediction:
            return NO_DRAFTS
        reader = self._readers.get(sequence.seq_id)
        if reader is None:
            reader = self._readers[sequence.seq_id] = _Reader(
                prediction=list(sequence.params.prediction), text_len=sequence.prompt_len
            )
        committed = sequence.tokens[reader.text_len :]
        self._accuracy.learn(reader.guesses(len(committed)), committed)
        reader.follow(sequence.tokens)
        guesses = reader.guesses(max_tokens)
        drafts = DraftTokens(
            tokens=tuple(guess.token for guess in guesses),
            confidences=tuple(map(self._accuracy.of, guesses)),
            source=SOURCE,
        )
        is_alone = self._is_last or sequence.params.drafter == SOURCE
        return drafts if is_alone or is_sure(drafts, max_tokens) else NO_DRAFTS

    def forget(self, sequence: Sequence) -> None:
        self._readers.pop(sequence.seq_id, None)
