"""From a request's prompts to token ids: off the event loop, and no more than can be of use."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from workers.errors import ContextLengthError

Prompt = str | tuple[int, ...]

NUM_THREADS = 2
"""Requests whose texts are read at a time: a long one does not hold up all others."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the service needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> Mapping[str, int]: ...


class PromptReader:
    """Tokenizes the prompts of one router's requests."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Byte-level vocabularies spell a token with a letter per byte, of which a character has
        # at least one, so no token stands for more characters than its name has.
        self._longest_token = max(len(name) for name in tokenizer.get_vocab())
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def read(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token ids of each prompt; raises ContextLengthError for a text that cannot fit.

        When the caller is cancelled, its texts that were not begun are not read any more.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_length(text)
        has_left = threading.Event()
        try:
            read = iter(await self._in_thread(texts, has_left) if texts else [])
        finally:
            has_left.set()
        return [next(read) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _in_thread(
        self, texts: list[str], has_left: threading.Event
    ) -> list[tuple[int, ...]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, texts, has_left)

    def _encode(self, texts: list[str], has_left: threading.Event) -> list[tuple[int, ...]]:
        read = []
        for text in texts:
            if has_left.is_set():
                break
            read.append(tuple(self._tokenizer.encode(text)))
        return read

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
