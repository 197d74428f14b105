"""What a model's chat template means for a request: how its texts end, and what they have to match.

Requests without a conversation are left as they are.
"""

from collections.abc import Sequence
from dataclasses import replace

from deployments.router.chat.message import TOOLS_FIELD, Conversation
from deployments.router.chat.template import ChatTemplate
from deployments.router.chat.text import MessageFormat
from deployments.router.request import GenerationRequest
from deployments.router.tokenizer import Tokenizer
from workers.errors import InvalidRequestError
from workers.grammar import Grammar

NUM_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it has opened the model's thoughts."""


class ChatRequests:
    """Adds to requests what the template of the served model asks for."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        *,
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        """`stop_strings` are those before which answers end by themselves."""
        self._template = template
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings

    def with_tags(self, request: GenerationRequest) -> GenerationRequest:
        """A request whose texts have the special tokens by which they are read as messages."""
        template = self._template
        are_needed = template is not None and any(
            isinstance(prompt, Conversation) and template.needs_special_tokens(prompt)
            for prompt in request.prompts
        )
        return replace(request, skip_special_tokens=False) if are_needed else request

    def with_ends(self, request: GenerationRequest) -> GenerationRequest:
        """A request whose chat ends where the model's own do; a grammar has an end of its own."""
        asked = request.prompts[0]
        if not isinstance(asked, Conversation) or request.ignore_eos:
            return request
        if asked.must_call or request.sampling.grammar is not None:
            return request
        return replace(request, stop=(*request.stop, *self._stop_strings))

    def with_grammar(
        self, request: GenerationRequest, prompts: Sequence[Sequence[int]]
    ) -> GenerationRequest:
        """A request with the grammar of calls that its client forces, and with room for thoughts.

        Args:
            prompts: the token ids of its prompts.
        """
        return self._with_thoughts_first(self._with_forced_calls(request), prompts)

    def _with_forced_calls(self, request: GenerationRequest) -> GenerationRequest:
        """A request whose grammar leaves nothing but calls, where its client forces some."""
        asked, template = request.prompts[0], self._template
        if not isinstance(asked, Conversation) or not asked.must_call:
            return request
        assert template is not None
        try:
            grammar = Grammar.tool_calls(template.forced_calls(asked))
        except RecursionError:
            raise InvalidRequestError(
                "tools has a schema that is nested too deeply", field=TOOLS_FIELD
            ) from None
        except ValueError:
            raise InvalidRequestError(
                "tools has a schema with a number that is not finite", field=TOOLS_FIELD
            ) from None
        sampling = replace(request.sampling, grammar=grammar)
        return replace(request, sampling=sampling, grammar_field=TOOLS_FIELD)

    def _with_thoughts_first(
        self, request: GenerationRequest, prompts: Sequence[Sequence[int]]
    ) -> GenerationRequest:
        """A request whose grammar leaves the model its thoughts, where its template has such."""
        grammar, asked = request.sampling.grammar, request.prompts[0]
        if grammar is None or not isinstance(asked, Conversation):
            return request
        message = self.message_format(asked, prompts[0])
        if message.reasoning is None or (
            # the template has closed the thoughts itself, so there are to be none
            not message.is_reasoning_open and message.reasoning.closing in self._end_of(prompts[0])
        ):
            return request
        opening = "" if message.is_reasoning_open else message.reasoning.opening
        grammar = replace(grammar, starts_after=message.reasoning.closing, opening=opening)
        return replace(request, sampling=replace(request.sampling, grammar=grammar))

    def message_format(self, conversation: Conversation, prompt: Sequence[int]) -> MessageFormat:
        """How to read a completion of a conversation, whose token ids are `prompt`, as a message.

        Only for one that `open` has taken.
        """
        template = self._template
        assert template is not None
        return template.message_format(conversation, self._end_of(prompt))

    def _end_of(self, prompt: Sequence[int]) -> str:
        """The end of a prompt's text, special tokens included."""
        return self._tokenizer.decode(list(prompt[-NUM_END_TOKENS:]), skip_special_tokens=False)
