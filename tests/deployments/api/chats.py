"""Answers of chats as models write them, and how clients read them."""

from collections.abc import Sequence
from typing import Any

import httpx
import openai

from tests.deployments.router.chat.templates import HERMES, LLAMA, MISTRAL, THINKING

SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[INST]", "[/INST]")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get", "put")]
CITY = '{"city": "Zürich 世界 👩‍👩‍👧"}'
CALL = f'<tool_call>\n{{"name": "get", "arguments": {CITY}}}\n</tool_call>'
ANSWERS = {
    "text": (HERMES, "Grüße, 世界! 👩‍👩‍👧 ď 🇨🇿\n삼겹살 "),
    "calls": (HERMES, f"Let me see 世.\n{CALL}\n{CALL.replace('get', 'put')}"),
    "thoughts": (THINKING, f"<think>\nHm, 世界?\n</think>\n\nWell:{CALL}"),
    "llama": (LLAMA, f'{{"name": "get", "parameters": {CITY}}}'),
    "mistral": (MISTRAL, f'[TOOL_CALLS] [{{"name": "get", "arguments": {CITY}}}]'),
}


def of_openai(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="unused", base_url="http://test/v1", http_client=client, max_retries=0
    )


def joined(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What the deltas of a choice make together, as a client does."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key, "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call["function"])
                else:
                    arguments = call["function"]["arguments"]
                    message["tool_calls"][call["index"]]["arguments"] += arguments
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    (message["finish_reason"],) = reasons
    return message
