"""Requests that schemathesis makes of the OpenAPI document, and requests that break it: none gets a
5xx, harms the next one or leaves anything behind.

`pytest tests/compat/test_schemathesis.py --cases 5000 --seed 1` makes so many, others with another
seed; the suite makes a few.
"""

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from tests.compat.conftest import MODEL, Server

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

TIMEOUT_S = 300
"""A chat without max_tokens may have the whole context, on a machine that does other things too."""
EVERY = 100
"""Between two checks that nothing is held, and an ordinary request still answered rightly."""
SHARE_OF_GETS = 20
"""One case in so many is of a route without a body, of which there is little to try."""

READABLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def read(path):", "max_tokens": 16},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Read a file."}],
        "max_tokens": 16,
    },
    "/tokenize": {"prompt": "def read(path):"},
    "/detokenize": {"tokens": [3, 4, 5]},
}
"""What every second case that keeps to the document has in place of its own: drawn names of models,
prompts and messages are hardly ever any that have an answer."""


@pytest.fixture
def num_cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--cases"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


def ask(server: Server) -> str:
    body = {"model": MODEL, "prompt": "import ", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{server.base_url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def shares(operations: Sequence[Any], num_cases: int) -> list[tuple[Any, Any, int]]:
    """Each operation with a mode and its number of cases: those with a body break it every second
    time."""
    modes = schemathesis.GenerationMode
    gets = [operation for operation in operations if operation.method == "get"]
    others = [operation for operation in operations if operation.method != "get"]
    num_of_get = max(1, num_cases // SHARE_OF_GETS // len(gets))
    num_of_other = max(1, (num_cases - num_of_get * len(gets)) // (2 * len(others)))
    return [(operation, modes.POSITIVE, num_of_get) for operation in gets] + [
        (operation, mode, num_of_other) for operation in others for mode in modes
    ]


def check(case: Any, response: Any) -> None:
    """Whatever is asked, a text or a refusal that says why."""
    text = response.text
    assert response.status_code < 500, (response.status_code, text, case.as_curl_command())
    if response.status_code == 200:
        # in a stream that has begun; a text of the model's own would have backslashes
        assert '"type":"server_error"' not in text, (text, case.as_curl_command())
        return
    # a model of Python source may well write the word itself
    assert "Traceback" not in text
    assert response.json()["error"]["message"], (text, case.as_curl_command())


def for_each_case(
    operation: Any, mode: Any, num_cases: int, seed: int, do: Callable[[Any], None]
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        do(case)

    run()


def test_no_request_gets_a_5xx(server: Server, num_cases: int, seed: int) -> None:
    root = server.base_url.removesuffix("/v1")
    schema = schemathesis.openapi.from_url(f"{root}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    expected = ask(server)
    modes = schemathesis.GenerationMode
    statuses: Counter[tuple[str, bool]] = Counter()
    """By mode, how many were refused and how many were not."""
    answered: set[str] = set()
    """The paths of which something was that keeps to the document."""

    def send(mode: str, case: Any) -> None:
        if mode == modes.POSITIVE and case.path in READABLE and statuses.total() % 2:
            case.body.update(READABLE[case.path], model=MODEL)
        response = case.call(base_url=root, timeout=TIMEOUT_S)
        check(case, response)
        statuses[mode, response.status_code >= 400] += 1
        if mode == modes.POSITIVE and response.status_code == 200:
            answered.add(case.path)
        if statuses.total() % EVERY == 0:
            server.wait_until_nothing_is_held()
            assert ask(server) == expected

    for operation, mode, num_own in shares(operations, num_cases):
        for_each_case(operation, mode, num_own, seed, partial(send, mode))
    server.wait_until_nothing_is_held()
    assert ask(server) == expected
    assert answered >= READABLE.keys()
    # what breaks the schema is refused, but for numbers in strings and the like
    assert statuses[modes.NEGATIVE, True] > statuses[modes.NEGATIVE, False], statuses
