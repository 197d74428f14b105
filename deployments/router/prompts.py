"""From prompts to token ids: off the event loop, and refused where they cannot fit."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from deployments.router.request import Prompt
from deployments.router.tokenizer import Tokenizer
from workers.errors import ContextLengthError

NUM_THREADS = 2
"""Requests that are tokenized at a time, so that a long one does not hold up all others."""


class PromptReader:
    """Tokenizes the prompts of one router's requests."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Byte-level vocabularies spell a token with a letter per byte, and a character has at
        # least one byte, so no token stands for more characters than its name has.
        self._longest_token = max(len(name) for name in tokenizer.get_vocab())
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def read(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """The token ids of each prompt; raises ContextLengthError for a text that cannot fit.

        When the caller is cancelled, those of its texts that were not begun are not read any more.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        for text in texts:
            self._check_length(text)
        has_left = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            encoded = iter(await loop.run_in_executor(self._threads, self._encode, texts, has_left))
        finally:
            has_left.set()
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _encode(self, texts: list[str], has_left: threading.Event) -> list[tuple[int, ...]]:
        """The token ids of the texts, up to where the client left.  Runs in a thread."""
        encoded = []
        for text in texts:
            if has_left.is_set():
                break
            encoded.append(tuple(self._tokenizer.encode(text)))
        return encoded

    def _check_length(self, text: str) -> None:
        """Refuse a text that must have too many tokens, before it costs anything to count them."""
        max_len = self._max_model_len * self._longest_token
        if len(text) > max_len:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters; the context is {self._max_model_len} "
                f"tokens of at most {self._longest_token} characters, so that no more than "
                f"{max_len} can fit; shorten the prompt",
                field="prompt",
            )
