"""Requests that schemathesis makes of the OpenAPI document: none gets a 5xx or harms the next one.

`pytest tests/compat/test_schemathesis.py --cases 5000 --seed 1` makes so many, others with another
seed; the suite makes a few.
"""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.compat.conftest import MODEL, Server

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

TIMEOUT_S = 300
"""A chat without max_tokens may have the whole context, on a machine that does other things too."""
EVERY = 100
"""Between two checks that an ordinary request is still answered rightly."""


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


def test_no_request_gets_a_5xx(server: Server, num_cases: int, seed: int) -> None:
    root = server.base_url.removesuffix("/v1")
    schema = schemathesis.openapi.from_url(f"{root}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    expected = ask(server)
    sent = 0

    for operation in operations:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max(1, num_cases // len(operations)),
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy())
        def send(case: Any) -> None:
            nonlocal sent
            response = case.call(base_url=root, timeout=TIMEOUT_S)
            text = response.text
            assert response.status_code < 500, (response.status_code, text, case.as_curl_command())
            # a model of Python source may well write the word itself
            assert response.status_code == 200 or "Traceback" not in text
            sent += 1
            if sent % EVERY == 0:
                assert ask(server) == expected

        send()
    assert ask(server) == expected
