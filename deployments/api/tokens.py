"""`POST /tokenize` and `POST /detokenize`: what a text is in tokens, and back, as vLLM has them."""

from typing import Annotated

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, Field

from deployments.api.answers import Endpoint
from deployments.api.errors import ERROR_RESPONSES
from deployments.api.validation import RequestModel, check_text
from deployments.router.service import GenerationService

Text = Annotated[str, AfterValidator(check_text)]
Model = Annotated[Text | None, Field(description="The served model's name, or nothing.")]


class TokenizeRequest(RequestModel):
    prompt: Annotated[Text, Field(description="The text.")]
    model: Model = None
    add_special_tokens: Annotated[
        bool, Field(description="Whether the tokenizer may add tokens, like one that begins texts.")
    ] = True
    return_token_strs: Annotated[
        bool, Field(description="Whether the answer has the tokens' names too.")
    ] = False


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    tokens: Annotated[list[int], Field(description="Token ids.")]
    model: Model = None


class Detokenized(BaseModel):
    prompt: str


def _add_tokenize(app: FastAPI, service: GenerationService) -> None:
    @app.post("/tokenize", responses={**ERROR_RESPONSES})
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """The tokens of a text. It may be longer than the context: `count` says by how much."""
        _check_model(service, body.model)
        tokens = await service.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        return Tokenized(
            count=len(tokens),
            max_model_len=service.model.info.max_model_len,
            tokens=list(tokens),
            token_strs=service.token_names(tokens) if body.return_token_strs else None,
        )


def _add_detokenize(app: FastAPI, service: GenerationService) -> None:
    @app.post("/detokenize", responses={**ERROR_RESPONSES})
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """The text of tokens, special ones included."""
        _check_model(service, body.model)
        return Detokenized(prompt=await service.detokenize(body.tokens))


def _check_model(service: GenerationService, name: str | None) -> None:
    if name is not None:
        service.check_model(name)


TOKENIZE = Endpoint(path="/tokenize", request_model=TokenizeRequest, add_route=_add_tokenize)
DETOKENIZE = Endpoint(
    path="/detokenize", request_model=DetokenizeRequest, add_route=_add_detokenize
)
