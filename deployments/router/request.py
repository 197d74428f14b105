"""A client's request in no wire format: what `deployments/api` makes and the service runs."""

from dataclasses import dataclass

from workers.types import SamplingParams

MAX_COMPLETIONS = 128
"""Completions of one request: its prompts times n."""

Prompt = str | tuple[int, ...]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything that decides a request's completions and how long they may take.

    A wire format has checked what can be checked without the model; the service checks the rest.
    This is also the place for what a client may ask for later: its tenant once there are keys,
    speculation options, how many logprobs it wants, whether the prompt is echoed, a grammar.
    """

    model: str
    """The name that the client gave; the service refuses one that it does not serve."""
    prompts: tuple[Prompt, ...]
    n: int = 1
    """Completions of each prompt."""
    max_tokens: int
    """Tokens of each completion at most."""
    sampling: SamplingParams
    seed: int | None = None
    """The seed of each prompt's first completion; the next ones count up. None draws one."""
    stop: tuple[str, ...] = ()
    """A completion ends before the first of these strings."""
    ignore_eos: bool = False
    """If true, completions go on after a token that ends the text."""
    cache_salt: str = ""
    """Prompts share cached prefixes with those of the same salt only."""
    timeout_s: float | None = None
    """Seconds that the client waits for the whole request; None means as long as it takes."""

    @property
    def num_completions(self) -> int:
        return len(self.prompts) * self.n
