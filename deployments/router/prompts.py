"""From prompts to token ids, and back: off the event loop, in turns between keys."""

import asyncio
import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TypeVar

from deployments.router.request import Prompt
from deployments.router.tenants.keys import ANYBODY, Tenant
from deployments.router.tenants.slots import Slots
from deployments.router.text import split_text
from deployments.router.tokenizer import Tokenizer, without_special_names
from workers.errors import ContextLengthError

InputT = TypeVar("InputT", bound=Sized)
OutputT = TypeVar("OutputT")

NUM_THREADS = 2
"""Requests that are read at a time, so that a long one does not hold up all others."""


class PromptReader:
    """Tokenizes the texts of one router's requests, and spells tokens out."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Byte-level vocabularies spell a token with a letter per byte, and a character has at
        # least one byte, so no token stands for more characters than its name has.
        self._longest_token = max(len(name) for name in tokenizer.get_vocab())
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._turns = Slots(NUM_THREADS)

    async def read(
        self,
        prompts: Sequence[Prompt],
        tenant: Tenant = ANYBODY,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        field: str = "prompt",
    ) -> list[tuple[int, ...]]:
        """The token ids of each prompt; raises ContextLengthError for a text that cannot fit.

        Args:
            add_special_tokens: whether the tokenizer adds its own, such as one that begins texts.
            parse_special_tokens: whether the name of a special token in a text means that token.
            field: the field of the request that has the texts, for errors.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        for text in texts:
            self._check_length(text, field)

        def encode(text: str) -> tuple[int, ...]:
            tokenizer = self._tokenizer if parse_special_tokens else self._literal_tokenizer
            return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))

        encoded = iter(await self._in_turn(tenant, encode, texts))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def detokenize(self, token_ids: Sequence[int], tenant: Tenant) -> str:
        """The text of token ids, special tokens included; the ids are known to be the model's."""
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        (text,) = await self._in_turn(tenant, decode, [list(token_ids)])
        return text

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        return without_special_names(self._tokenizer)

    async def read_words(self, words: Sequence[str], tenant: Tenant) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word at the beginning of a text, and behind a space."""

        def encode(word: str) -> list[tuple[int, ...]]:
            stripped = word.lstrip()
            spellings = (word, f" {stripped}") if stripped else (word,)
            return [tuple(self._tokenizer.encode(w, add_special_tokens=False)) for w in spellings]

        pairs = await self._in_turn(tenant, encode, words)
        return tuple(dict.fromkeys(spelling for pair in pairs for spelling in pair if spelling))

    async def split(
        self, prompts: Sequence[tuple[int, ...]], tenant: Tenant, *, skip_special_tokens: bool
    ) -> list[tuple[str, ...]]:
        """What each token of each prompt adds to its text."""
        split = partial(split_text, self._tokenizer, skip_special_tokens=skip_special_tokens)
        return await self._in_turn(tenant, split, prompts)

    async def _in_turn(
        self, tenant: Tenant, read: Callable[[InputT], OutputT], inputs: Sequence[InputT]
    ) -> list[OutputT]:
        """Read each input in a thread, when it is the tenant's turn.

        Tenants take turns by the length of what they have read, so that one with much to read does
        not hold up the others. When the caller is cancelled, inputs that were not begun are left.
        """
        length = sum(map(len, inputs))
        with self._turns.queue(tenant, priority=0, num_tokens=length) as place:
            await place.has_slot.wait()  # and if it is taken away again, the inputs are read
            place.num_used = length
            return await self._in_thread(read, inputs)

    async def _in_thread(
        self, read: Callable[[InputT], OutputT], inputs: Sequence[InputT]
    ) -> list[OutputT]:
        has_left = threading.Event()

        def read_all() -> list[OutputT]:
            outputs = []
            for item in inputs:
                if has_left.is_set():
                    break
                outputs.append(read(item))
            return outputs

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read_all)
        finally:
            has_left.set()

    def _check_length(self, text: str, field: str = "prompt") -> None:
        """Refuse a text that must have too many tokens, before it costs anything to count them."""
        max_len = self._max_model_len * self._longest_token
        if len(text) > max_len:
            raise ContextLengthError(
                f"the {field} has {len(text)} characters; the context is {self._max_model_len} "
                f"tokens of at most {self._longest_token} characters, so that no more than "
                f"{max_len} can fit; shorten the {field}",
                field=field,
            )
