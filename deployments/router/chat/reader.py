"""From conversations to token ids: off the event loop, in bounded time."""

import asyncio
from collections.abc import Sequence

from deployments.router.chat.message import FIELD, Conversation
from deployments.router.chat.template import ChatTemplate
from deployments.router.chat.time_limit import run_within
from deployments.router.prompts import PromptReader
from deployments.router.request import Prompt
from workers.errors import ContextLengthError, InvalidRequestError

NUM_THREADS = 2
"""Conversations that are rendered at a time; more wait their turn."""
RENDER_TIMEOUT_S = 10.0
"""How long a template may take."""


class ConversationReader:
    """Reads the conversations of one router's requests by the model's chat template."""

    def __init__(
        self,
        template: ChatTemplate | None,
        prompts: PromptReader,
        *,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        self._template = template
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(NUM_THREADS)

    async def read(self, prompts: Sequence[Prompt | Conversation]) -> list[Prompt]:
        """The prompts, with token ids in place of conversations.

        Raises InvalidRequestError for a conversation that the template does not take, and
        ContextLengthError for one that cannot fit.
        """
        return [
            await self.tokenize(prompt) if isinstance(prompt, Conversation) else prompt
            for prompt in prompts
        ]

    async def tokenize(
        self, conversation: Conversation, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The tokens of one conversation; raises as `read` does.

        Without `add_special_tokens` they are those that `apply_chat_template` gives: the template
        writes all special ones.
        """
        text = await self._render(conversation)
        try:
            return await self._prompts.tokenize(text, add_special_tokens=add_special_tokens)
        except ContextLengthError as error:
            raise ContextLengthError(str(error), field=FIELD) from None

    async def _render(self, conversation: Conversation) -> str:
        template = self._template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template, so that it takes no messages; send a prompt "
                "instead, or start the server with chat_template=<a file with one in Jinja>",
                field=FIELD,
            )
        try:
            async with self._slots:
                return await run_within(self._timeout_s, lambda: template.render(conversation))
        except TimeoutError:
            raise InvalidRequestError(
                "the model's chat template was still at work on the messages after "
                f"{self._timeout_s:g} s; send fewer, or start the server with another template by "
                "chat_template=<a file>",
                field=FIELD,
            ) from None
