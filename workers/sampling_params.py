"""What a request asks of the law that its tokens are sampled from."""

from dataclasses import dataclass

from workers.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's next-token law is shaped. The defaults leave it as the model gives it.

    Applied in this order: grammar, logit bias, repetition, presence and frequency penalty, bans
    (min_tokens, bad_words), temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides (multiplies) positive (negative) logits of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once for every token that stands in the output."""
    frequency_penalty: float = 0.0
    """Subtracted as often as a token stands in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit."""
    min_tokens: int = 0
    """No token of `stop_token_ids` is chosen before the output has so many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text. The model's own are among them where `min_tokens` needs them."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that do not stand in the output: the last one of a run is not chosen where the
    ones before it have just been."""
    grammar: Grammar | None = None
    """What the completion has to match: the logits of all other tokens are -inf."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token of the model's own law is taken."""
        return self.is_greedy and self.grammar is None and not self._is_shaped

    @property
    def is_only_scaled(self) -> bool:
        """Whether the law is the model's own but for its temperature and its grammar."""
        is_whole = self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0
        return is_whole and not self._is_shaped

    @property
    def _is_shaped(self) -> bool:
        """Whether logits that a grammar allows are changed, before temperature and truncations."""
        return self.has_penalties or bool(self.logit_bias) or self.has_bans

    @property
    def has_bans(self) -> bool:
        """Whether some tokens may not be chosen at some positions."""
        return self.min_tokens > 0 or bool(self.bad_words)

    @property
    def needs_history(self) -> bool:
        """Whether the tokens before a position shape its law."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


AS_BEFORE = SamplingParams(temperature=-1.0)
"""Stands for what the last request for a sequence said, which a worker keeps with the sequence's
cache: biases, banned words and grammars may be long, and a sequence has many rounds."""
