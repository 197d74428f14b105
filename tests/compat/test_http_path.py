"""`tandem bench http-path` over a real connection."""

from tandem.bench.http_path import measure
from tandem.live.client import Endpoint, Load
from tests.compat.conftest import MODEL, Server


def test_both_ways_write_the_same_texts(server: Server) -> None:
    """`measure` raises LoadError where they differ."""
    endpoint = Endpoint(url=server.base_url.removesuffix("/v1"), model=MODEL)
    prompts = ["def read(path):", "import os\n", "class Reader:"]
    pair = measure(endpoint, Load(prompts=prompts, max_tokens=16, temperature=0.0))
    assert pair.streams_s > 0.0
    assert pair.one_request_s > 0.0
