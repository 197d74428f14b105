"""`POST /tokenize` and `POST /detokenize`: what a text or a conversation is in tokens, and back, as
vLLM has them."""

from typing import Annotated, Self

from fastapi import FastAPI, Request
from pydantic import AfterValidator, BaseModel, Field, model_validator

from deployments.api import unserved
from deployments.api.answers import Endpoint
from deployments.api.auth import caller_of
from deployments.api.chat_messages import Messages
from deployments.api.conversation_fields import ConversationFields
from deployments.api.errors import ERROR_RESPONSES
from deployments.api.validation import RequestModel, check_text, field_error
from deployments.router.request import Caller
from deployments.router.service import GenerationService

Text = Annotated[str, AfterValidator(check_text)]
Model = Annotated[Text | None, Field(description="The served model's name, or nothing.")]


class TokenizeRequest(ConversationFields):
    """A text, or the conversation of a chat."""

    prompt: Annotated[Text | None, Field(description="The text.")] = None
    messages: Annotated[
        Messages, Field(description="The conversation, in place of `prompt`.", default_factory=list)
    ]
    model: Model = None
    add_special_tokens: Annotated[
        bool | None,
        Field(
            description="Whether the tokenizer may add tokens, like one that begins texts. By "
            "default it may to a text; a chat template writes its own."
        ),
    ] = None
    parse_special_tokens: Annotated[
        bool,
        Field(
            description="If false, the name of a special token in `prompt` is a text like any "
            "other. Only with `prompt`: a chat template writes such names."
        ),
    ] = True
    return_token_strs: Annotated[
        bool, Field(description="Whether the answer has the tokens' names too.")
    ] = False

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.TOKENIZE

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.prompt is None and not self.messages:
            raise field_error(
                "prompt", "prompt is missing: send a text in it, or a conversation in messages"
            )
        if self.prompt is not None and self.messages:
            raise field_error("messages", "messages and prompt are given; send one of them")
        if self.messages and not self.parse_special_tokens:
            raise field_error(
                "parse_special_tokens",
                "parse_special_tokens is false, but messages are given, whose chat template writes "
                "special tokens by their names; leave it out, or send a prompt",
            )
        return self

    async def tokens(self, service: GenerationService, caller: Caller) -> tuple[int, ...]:
        """The token ids; raises InvalidRequestError, OverloadedError and their subclasses."""
        return await service.tokenize(
            self.conversation() if self.prompt is None else self.prompt,
            caller.tenant,
            add_special_tokens=self.add_special_tokens,
            parse_special_tokens=self.parse_special_tokens,
        )


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    tokens: Annotated[list[int], Field(description="Token ids.")]
    model: Model = None

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.DETOKENIZE


class Detokenized(BaseModel):
    prompt: str


def _add_tokenize(app: FastAPI, service: GenerationService) -> None:
    @app.post("/tokenize", responses={**ERROR_RESPONSES})
    async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
        """The tokens of a text or a conversation. It may be longer than the context: `count` says
        by how much."""
        _check_model(service, body.model)
        tokens = await body.tokens(service, caller_of(request.scope))
        return Tokenized(
            count=len(tokens),
            max_model_len=service.model.info.max_model_len,
            tokens=list(tokens),
            token_strs=service.token_names(tokens) if body.return_token_strs else None,
        )


def _add_detokenize(app: FastAPI, service: GenerationService) -> None:
    @app.post("/detokenize", responses={**ERROR_RESPONSES})
    async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
        """The text of tokens, special ones included."""
        _check_model(service, body.model)
        tenant = caller_of(request.scope).tenant
        return Detokenized(prompt=await service.detokenize(body.tokens, tenant))


def _check_model(service: GenerationService, name: str | None) -> None:
    if name is not None:
        service.check_model(name)


TOKENIZE = Endpoint(path="/tokenize", request_model=TokenizeRequest, add_route=_add_tokenize)
DETOKENIZE = Endpoint(
    path="/detokenize", request_model=DetokenizeRequest, add_route=_add_detokenize
)
