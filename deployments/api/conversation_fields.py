"""The fields that make a conversation's prompt: of chats, and of what counts their tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from deployments.api.chat_messages import Messages, Tools
from deployments.api.marks import Grpc, Takes
from deployments.api.validation import RequestModel, field_error
from deployments.router.chat.message import Conversation


class ConversationFields(RequestModel):
    """Messages, tools, and what the chat template is told beside them."""

    messages: Annotated[
        Messages,
        Field(min_length=1, description="The conversation so far, for the chat template."),
        Takes(
            "a list of messages, each with a `role` (system, developer, user, assistant or tool), "
            "`content` (a string or a list of parts of the type text), and with `name`, "
            "`tool_calls`, `tool_call_id`, `reasoning_content` where they belong"
        ),
    ]
    tools: Annotated[
        Tools,
        Field(
            description="Functions that the model may call. The chat template tells the model of "
            "them.",
            default_factory=list,
        ),
        Takes("a list of at most 128 tools of the type function, as OpenAI has them"),
    ]
    add_generation_prompt: Annotated[
        bool, Field(description="Whether the prompt ends with the opening of an answer."), Grpc(53)
    ] = True
    continue_final_message: Annotated[
        bool,
        Field(
            description="If true, the answer continues the last message; add_generation_prompt has "
            "to be false."
        ),
        Grpc(54),
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Field(
            description="Further variables of the chat template, like enable_thinking.",
            default_factory=dict,
        ),
        Takes("an object"),
    ]

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error(
                "continue_final_message",
                "continue_final_message is true, but so is add_generation_prompt, which begins a "
                "new message; send add_generation_prompt false with it",
            )
        return self

    def conversation(self) -> Conversation:
        return Conversation(
            messages=tuple(message.to_message() for message in self.messages),
            tools=tuple(self.tools),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs(),
        )

    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables of the template that the client has set."""
        return self.chat_template_kwargs
