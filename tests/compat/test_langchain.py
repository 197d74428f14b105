"""LangChain's clients for OpenAI's wire format."""

import pytest

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


def test_a_completion_model_answers(server: Server) -> None:
    model = langchain_openai.OpenAI(
        base_url=server.base_url,
        model=MODEL,
        max_tokens=16,
        extra_body={"ignore_eos": True},
        **OPTIONS,
    )
    assert model.invoke(PROMPT) == expected_text(server, server.tokenizer.encode(PROMPT), 16)
