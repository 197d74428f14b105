"""Prompt lookup: what followed the last tokens when they stood in the text before.

The last tokens are looked for earlier in prompt and output; the place that agrees with the text
furthest back is taken, the latest if several do, and what follows it is the draft. That is right
where a text repeats itself or its prompt: edited code, quotations, tables, lists (Saxena, "Prompt
lookup decoding", 2023).

Places are found as in LZ77 (zlib's hash chains): every pair of tokens knows where it stood before.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from deployments.router.drafting.accuracy import MAX_MATCH_LEN, SURE, Guess, MatchAccuracy
from deployments.router.sequence import Sequence
from workers.types import NO_DRAFTS, DraftTokens

SOURCE = "prompt_lookup"
MAX_PLACES = 32
"""Places of the last pair that are compared, the latest ones."""
MAX_INDEXED_AT_ONCE = 4096
"""Tokens that one round may add to an index, about a millisecond's work: a longer prompt is drafted
from some rounds later, and holds up nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An earlier place that reads as the end of a text does."""

    position: int
    """Where the token stands there that equals the text's last one."""
    length: int
    """Tokens that agree, from 1 to MAX_MATCH_LEN."""


class PlaceIndex:
    """Where the end of a growing text stood before.

    Memory: 4 bytes per token, and about 110 per distinct token and pair of neighbours. The tokens
    stay with their owner.
    """

    def __init__(self) -> None:
        self._newest_pair: dict[int, int] = {}
        """The last position of each pair of tokens, that of its second token."""
        self._previous_pair = array("i")
        """Per position, where the pair that ends there stood before; -1 if nowhere."""
        self._newest_token: dict[int, int] = {}
        self._previous_token = -1
        """Where the text's last token stood before; -1 if nowhere."""

    def extend(self, tokens: Tokens[int]) -> bool:
        """Take in added tokens, not too many at once; returns whether all of them are in."""
        first = len(self._previous_pair)
        pairs, previous, singles = self._newest_pair, self._previous_pair, self._newest_token
        for position in range(first, min(first + MAX_INDEXED_AT_ONCE, len(tokens))):
            token = tokens[position]
            pair = tokens[position - 1] << 32 | token if position else -1
            previous.append(pairs.get(pair, -1))
            pairs[pair] = position
            self._previous_token = singles.get(token, -1)
            singles[token] = position
        return len(previous) == len(tokens)

    def find(self, tokens: Tokens[int]) -> Match | None:
        """The longest match of the text's end among the last places; of equals the latest."""
        last = Match(position=self._previous_token, length=1)
        match = self._longest(tokens, tokens, self._previous_pair[-1])
        return match or (last if last.position >= 0 else None)

    def find_in(self, tokens: Tokens[int], text: Tokens[int]) -> Match | None:
        """The longest match, of two tokens at least, of the end of another text in these tokens."""
        pair = text[-2] << 32 | text[-1] if len(text) > 1 else -1
        return self._longest(tokens, text, self._newest_pair.get(pair, -1))

    def _longest(self, tokens: Tokens[int], text: Tokens[int], position: int) -> Match | None:
        """The longest match among this place of the text's last pair and those before it."""
        best: Match | None = None
        for _ in range(MAX_PLACES):
            longest = 1 if best is None else best.length
            if position < 0 or longest == MAX_MATCH_LEN:
                break
            length = match_length(tokens, position, text, more_than=longest)
            if length > longest:
                best = Match(position=position, length=length)
            position = self._previous_pair[position]
        return best


@dataclass(slots=True, kw_only=True)
class _Reader:
    """One sequence, and what was last foreseen of it."""

    index: PlaceIndex = field(default_factory=PlaceIndex)
    match: Match | None = None
    text_len: int = 0
    """Length of the text when `match` was found."""

    def guesses(self, tokens: Tokens[int], num_tokens: int) -> Iterator[Guess]:
        """What was foreseen from there on; each token that is right makes the match longer."""
        if self.match is not None:
            position, length = self.match.position, self.match.length
            foreseen = continuation(tokens, position, self.text_len, num_tokens)
            yield from (Guess(token, length + index) for index, token in enumerate(foreseen))


class PromptLookup:
    """Drafts for any number of sequences by prompt lookup.

    Its confidences are measured: how often it was right with a match of that length.
    """

    source = SOURCE

    def __init__(self, *, is_last: bool = True) -> None:
        """Unless it is the last drafter or the request's own, it is silent where it is not
        SURE."""
        self._is_last = is_last
        self._readers: dict[str, _Reader] = {}
        self._accuracy = MatchAccuracy()

    def __len__(self) -> int:
        """Sequences of which something is kept."""
        return len(self._readers)

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        tokens = sequence.tokens
        reader = self._readers.setdefault(sequence.seq_id, _Reader())
        if not reader.index.extend(tokens):
            return NO_DRAFTS
        self._accuracy.learn(
            reader.guesses(tokens, len(tokens) - reader.text_len), tokens[reader.text_len :]
        )
        reader.match, reader.text_len = reader.index.find(tokens), len(tokens)
        guesses = list(reader.guesses(tokens, max_tokens))
        confidences = tuple(map(self._accuracy.of, guesses))
        is_alone = self._is_last or sequence.params.drafter == SOURCE
        if not guesses or (confidences[0] < SURE and not is_alone):
            return NO_DRAFTS
        return DraftTokens(
            tokens=tuple(guess.token for guess in guesses), confidences=confidences, source=SOURCE
        )

    def forget(self, sequence: Sequence) -> None:
        self._readers.pop(sequence.seq_id, None)


def continuation(
    tokens: Tokens[int], position: int, text_len: int, num_tokens: int
) -> tuple[int, ...]:
    """How the first `text_len` tokens go on, if as they did after `position`, and round again.

    At the end of the text the copy goes on with itself: period = text_len - 1 - position.
    """
    first, period = position + 1, text_len - 1 - position
    return tuple(tokens[first + index % period] for index in range(num_tokens))


def match_length(tokens: Tokens[int], position: int, text: Tokens[int], *, more_than: int) -> int:
    """How many tokens up to a position are the last of a text, at most MAX_MATCH_LEN.

    0 if not `more_than`.
    """
    end, length = len(text) - 1, more_than + 1
    first, last_first = position - more_than, end - more_than
    if min(first, last_first) < 0 or tokens[first : position + 1] != text[last_first:]:
        return 0
    while (
        length < MAX_MATCH_LEN
        and min(position, end) >= length
        and tokens[position - length] == text[end - length]
    ):
        length += 1
    return length
