"""LangChain's clients for OpenAI's wire format."""

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.compat.conftest import MODEL, Server
from tests.compat.test_openai import MESSAGES, PROMPT, chat_prompt, expected_text

langchain_openai = pytest.importorskip("langchain_openai")

OPTIONS = {"api_key": "unused", "temperature": 0, "max_retries": 0}


def test_a_chat_model_answers_and_streams(server: Server) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=server.base_url,
        model=MODEL,
        max_tokens=16,
        extra_body={"ignore_eos": True},
        **OPTIONS,
    )
    messages = [(message["role"], message["content"]) for message in MESSAGES]
    expected = expected_text(server, chat_prompt(server), 16)
    assert chat.invoke(messages).content == expected
    assert "".join(chunk.content for chunk in chat.stream(messages)) == expected


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=6)
    age: Literal[1, 2, 3]


def test_forced_calls_make_objects(server: Server) -> None:
    """A model that was never taught to call anything makes them too."""
    chat = langchain_openai.ChatOpenAI(
        base_url=server.base_url, model=MODEL, max_tokens=300, seed=1, **OPTIONS
    )
    structured = chat.with_structured_output(Person, method="function_calling")
    assert isinstance(structured.invoke("Ann is 2."), Person)
    for choice in ("any", "Person"):
        bound = chat.bind_tools([Person], tool_choice=choice, parallel_tool_calls=False)
        (call,) = bound.invoke("Ann is 2.").tool_calls
        assert call["name"] == "Person"
        assert Person.model_validate(call["args"])
        whole = None
        for chunk in bound.stream("Ann is 2."):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert whole.tool_calls[0]["args"] == call["args"]


def test_a_completion_model_answers(server: Server) -> None:
    model = langchain_openai.OpenAI(
        base_url=server.base_url,
        model=MODEL,
        max_tokens=16,
        extra_body={"ignore_eos": True},
        **OPTIONS,
    )
    assert model.invoke(PROMPT) == expected_text(server, server.tokenizer.encode(PROMPT), 16)
