"""Prompt lookup: what followed the last tokens when they stood in the text before.

The last tokens are looked for earlier in prompt and output; the place that agrees with the text
furthest back is taken, the latest if several do, and what follows it is the draft. That is right
where a text repeats itself or its prompt: edited code, quotations, tables, lists (Saxena, "Prompt
lookup decoding", 2023).

Places are found as in LZ77 (zlib's hash chains): every pair of tokens knows where it stood before.
"""

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from deployments.router.sequence import Sequence
from workers.types import NO_DRAFTS, DraftTokens

SOURCE = "prompt_lookup"
MAX_MATCH_LEN = 16
"""Tokens that are compared: agreement further back would not make a place more likely."""
MAX_PLACES = 32
"""Places of the last pair that are compared, the latest ones."""
MAX_INDEXED_AT_ONCE = 4096
"""Tokens that one round may add to an index, about a millisecond's work: a longer prompt is drafted
from some rounds later, and holds up nobody."""
LEARNING_RATE = 0.02
"""Share of each new observation in the measured accuracy."""
SURE = 0.8
"""How likely the first draft has to be right where another drafter would speak instead."""


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
        """For the pair at each position, where it stood before; -1 if nowhere."""
        self._newest_token: dict[int, int] = {}
        self._previous_token = -1
        """Where the text's last token stood before; -1 if nowhere."""

    def extend(self, tokens: Tokens[int]) -> bool:
        """Take in tokens that were added, not too many at once; whether all of them are in."""
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
        end = len(tokens) - 1
        best_position, best_length = self._previous_token, 1
        position = self._previous_pair[end]
        for _ in range(MAX_PLACES):
            if position < 0 or best_length == MAX_MATCH_LEN:
                break
            length = _match_length(tokens, position, end, more_than=best_length)
            if length > best_length:
                best_position, best_length = position, length
            position = self._previous_pair[position]
        return Match(position=best_position, length=best_length) if best_position >= 0 else None


@dataclass(slots=True, kw_only=True)
class _Reader:
    """One sequence, and what was last foreseen of it."""

    index: PlaceIndex = field(default_factory=PlaceIndex)
    match: Match | None = None
    text_len: int = 0
    """Length of the text when `match` was found."""


class PromptLookup:
    """Drafts for any number of sequences by prompt lookup.

    How often it was right is measured by the length of the match, over all sequences and whether or
    not its drafts were verified: those are its confidences.
    """

    source = SOURCE

    def __init__(self, *, is_last: bool = True) -> None:
        """Unless it is the last drafter, it is silent where it is not SURE."""
        self._least_confidence = 0.0 if is_last else SURE
        self._readers: dict[str, _Reader] = {}
        # a match of n tokens is expected to go on for n more before it ends
        self._accuracy = [length / (length + 1) for length in range(MAX_MATCH_LEN + 1)]

    def __len__(self) -> int:
        """Sequences of which something is kept."""
        return len(self._readers)

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        tokens = sequence.tokens
        reader = self._readers.setdefault(sequence.seq_id, _Reader())
        if not reader.index.extend(tokens):
            return NO_DRAFTS
        self._learn(reader, tokens)
        reader.match, reader.text_len = reader.index.find(tokens), len(tokens)
        if reader.match is None:
            return NO_DRAFTS
        length = reader.match.length
        confidences = tuple(self._accuracy_of(length + index) for index in range(max_tokens))
        if confidences[0] < self._least_confidence:
            return NO_DRAFTS
        return DraftTokens(
            tokens=continuation(tokens, reader.match.position, len(tokens), max_tokens),
            confidences=confidences,
            source=SOURCE,
        )

    def forget(self, sequence: Sequence) -> None:
        self._readers.pop(sequence.seq_id, None)

    def _accuracy_of(self, length: int) -> float:
        return self._accuracy[min(length, MAX_MATCH_LEN)]

    def _learn(self, reader: _Reader, tokens: Tokens[int]) -> None:
        """Compare what was foreseen with what was committed since, up to the first difference."""
        if reader.match is None:
            return
        committed = tokens[reader.text_len :]
        foreseen = continuation(tokens, reader.match.position, reader.text_len, len(committed))
        for index, (token, guess) in enumerate(zip(committed, foreseen, strict=True)):
            length = min(reader.match.length + index, MAX_MATCH_LEN)
            self._accuracy[length] += LEARNING_RATE * ((token == guess) - self._accuracy[length])
            if token != guess:
                break


def continuation(
    tokens: Tokens[int], position: int, text_len: int, num_tokens: int
) -> tuple[int, ...]:
    """How the first `text_len` tokens go on, if as they did after `position`, and round again.

    At the end of the text the copy goes on with itself: period = text_len - 1 - position.
    """
    first, period = position + 1, text_len - 1 - position
    return tuple(tokens[first + index % period] for index in range(num_tokens))


def _match_length(tokens: Tokens[int], position: int, end: int, *, more_than: int) -> int:
    """How many tokens up to both positions agree, at most MAX_MATCH_LEN; 0 if not `more_than`."""
    length = more_than + 1
    first, last_first = position - more_than, end - more_than
    if first < 0 or tokens[first : position + 1] != tokens[last_first : end + 1]:
        return 0
    while (
        length < MAX_MATCH_LEN
        and position >= length
        and tokens[position - length] == tokens[end - length]
    ):
        length += 1
    return length
