"""What came of a request over HTTP, in a form in which two answers can be compared."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.fuzz.cases import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to a request."""

    status: int
    texts: tuple[tuple[str, str | None], ...] = ()
    """The text of each choice, with its finish reason."""
    usage: tuple[int, int] = (0, 0)
    """Tokens of prompts and of completions."""
    num_accepted: int = 0
    error: str = ""

    @property
    def is_refused(self) -> bool:
        return 400 <= self.status < 500

    @property
    def without_chance(self) -> "Outcome":
        """What does not depend on drafts; of a refusal it is said at one place or at another."""
        return replace(self, num_accepted=0, error="")


def outcome_of(events: Sequence[Body]) -> Outcome:
    """The outcome that a whole answer tells, or the events of a stream."""
    parts: dict[int, dict[str, str]] = defaultdict(lambda: defaultdict(str))
    reasons: dict[int, str | None] = {}
    usage: Body = {}
    for event in events:
        if "error" in event:
            is_refused = event["error"]["type"] == "invalid_request_error"
            return Outcome(status=400 if is_refused else 500, error=json.dumps(event["error"]))
        for choice in event["choices"]:
            for name, text in _parts(choice):
                parts[choice["index"]][name] += text
            reasons[choice["index"]] = choice["finish_reason"]
        usage = event.get("usage") or usage
    details = usage.get("completion_tokens_details", {})
    return Outcome(
        status=200,
        texts=tuple((_joined(parts[index]), reasons[index]) for index in sorted(reasons)),
        usage=(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)),
        num_accepted=details.get("accepted_prediction_tokens", 0),
    )


def _parts(choice: Body) -> Iterator[tuple[str, str]]:
    """The texts in a choice, or in a part of it, each with its place; ids are random."""
    if "text" in choice:
        yield "", choice["text"]
        return
    message: dict[str, Any] = choice.get("message") or choice["delta"]
    for name in ("content", "reasoning_content"):
        yield name, message.get(name) or ""
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        for name in ("name", "arguments"):
            yield f"call {call.get('index', index)} {name}", function.get(name) or ""


def _joined(parts: dict[str, str]) -> str:
    """A completion's text as it is, and a message as JSON."""
    return parts[""] if "" in parts else json.dumps({k: v for k, v in parts.items() if v})
