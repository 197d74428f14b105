"""`prediction`: what a client expects most of a completion to be, as OpenAI has it."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from deployments.api.marks import Grpc, Takes
from deployments.api.text_parts import TextPart, joined
from deployments.api.validation import RequestModel, check_text


def _joined(value: Any) -> Any:
    """The text of all parts, one directly behind the other."""
    return joined(value, by="")


class Prediction(RequestModel):
    """A text that the completions are drafted from; their tokens are the same in any case."""

    type: Annotated[
        Literal["content"],
        Field(description="The only kind that there is."),
        Takes("content"),
        Grpc(1),
    ] = "content"
    content: Annotated[
        str,
        BeforeValidator(_joined, json_schema_input_type=str | list[TextPart]),
        AfterValidator(check_text),
        Field(
            description="What most of each completion is expected to be, such as a file that is to "
            "be edited. It is drafted from before all drafters have their turn, also with "
            "`drafter=none`. At most max_model_len tokens."
        ),
        Takes(
            'a string, or a list of parts like {"type": "text", "text": ...}; over gRPC a string'
        ),
        Grpc(2),
    ]
