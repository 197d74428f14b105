"""LiteLLM in front of the server, as a library."""

import pytest

from tests.compat.conftest import MODEL, Server
from tests.compat.test_openai import MESSAGES, PROMPT, chat_prompt, expected_text

litellm = pytest.importorskip("litellm")
# of its own answers, whose classes differ from what they declare
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_chat_whole_and_streamed(server: Server) -> None:
    options = {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "base_url": server.base_url,
        "api_key": "unused",
        "max_tokens": 16,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    expected = expected_text(server, chat_prompt(server), 16)
    assert litellm.completion(**options).choices[0].message.content == expected
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_a_text_completion(server: Server) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt=PROMPT,
        api_base=server.base_url,
        api_key="unused",
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    expected = expected_text(server, server.tokenizer.encode(PROMPT), 16)
    assert answer.choices[0].text == expected
