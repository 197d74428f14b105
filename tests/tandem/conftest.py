"""What the benchmarks' tests measure."""

from collections.abc import Iterator

import pytest

from tests.tandem.openai_server import OpenAIServer, openai_server


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as running:
        yield running
