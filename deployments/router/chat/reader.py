"""From conversations to token ids: off the event loop, in bounded time, in turns between keys."""

import asyncio
import math
from collections.abc import Callable, Sequence

from deployments.router.chat.message import FIELD, Conversation
from deployments.router.chat.template import ChatTemplate
from deployments.router.chat.time_limit import run_within
from deployments.router.prompts import PromptReader
from deployments.router.request import Prompt
from deployments.router.tenants.keys import ANYBODY, Tenant
from deployments.router.tenants.slots import Slots
from workers.errors import ContextLengthError, InvalidRequestError

NUM_THREADS = 2
"""Conversations that are rendered at a time; more wait their turn, unless a key has less than its
share."""
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
        self._turns = Slots(NUM_THREADS)

    async def read(
        self, prompts: Sequence[Prompt | Conversation], tenant: Tenant = ANYBODY
    ) -> list[Prompt]:
        """The prompts, with token ids in place of conversations.

        Raises InvalidRequestError for a conversation that the template does not take, and
        ContextLengthError for one that cannot fit.
        """
        return [
            await self.tokenize(prompt, tenant) if isinstance(prompt, Conversation) else prompt
            for prompt in prompts
        ]

    async def tokenize(
        self, conversation: Conversation, tenant: Tenant, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The tokens of one conversation; raises as `read` does.

        Without `add_special_tokens` they are those that `apply_chat_template` gives: the template
        writes all special ones.
        """
        text = await self._render(conversation, tenant)
        try:
            (tokens,) = await self._prompts.read(
                [text], tenant, add_special_tokens=add_special_tokens
            )
        except ContextLengthError as error:
            raise ContextLengthError(str(error), field=FIELD) from None
        return tokens

    async def _render(self, conversation: Conversation, tenant: Tenant) -> str:
        template = self._template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template, so that it takes no messages; send a prompt "
                "instead, or start the server with chat_template=<a file with one in Jinja>",
                field=FIELD,
            )
        try:
            return await self._in_turn(tenant, lambda: template.render(conversation))
        except TimeoutError:
            raise InvalidRequestError(
                "the model's chat template was still at work on the messages after "
                f"{self._timeout_s:g} s; send fewer, or start the server with another template by "
                "chat_template=<a file>",
                field=FIELD,
            ) from None

    async def _in_turn(self, tenant: Tenant, render: Callable[[], str]) -> str:
        """The text, when it is the tenant's turn; raises TimeoutError.

        Turns are reckoned in milliseconds: what a template makes of a conversation, and so how
        long it takes, shows in none of its lengths.
        """
        clock = asyncio.get_running_loop().time
        longest = math.ceil(self._timeout_s * 1000)
        with self._turns.queue(tenant, priority=0, num_tokens=longest) as place:
            await place.has_slot.wait()  # and if it is taken away again, the template goes on
            began = clock()
            try:
                return await run_within(self._timeout_s, render)
            finally:
                place.num_used = math.ceil((clock() - began) * 1000)
