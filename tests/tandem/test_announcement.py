"""What is printed of a good start can be acted on."""

import json
import shlex
from typing import Any

import pytest

from cluster.found_model import FoundModel
from deployments.args import KEYS_VARIABLE, AppArgs
from deployments.preflight import Preflight
from tandem.announcement import before_start, ready
from workers.cache_size import GIB
from workers.types import WorkerInfo

TARGET = WorkerInfo(
    model="m", vocab_size=8, max_model_len=4096, eos_token_ids=(), num_blocks=100, block_size=16
)


def lines(**options: Any) -> str:
    return "\n".join(ready(AppArgs(**options), TARGET, 12.3, "10.0.0.7:4321"))


def test_address_model_and_grpc_are_named() -> None:
    said = lines(http_port=8080, grpc_port=9090, served_model_name="mine")
    assert "http://127.0.0.1:8080/v1\n" in said
    assert "mine, 4,096 tokens of prompt and completion\n" in said
    assert "1,600 tokens of all requests\n" in said
    assert "1,600 tokens of all requests, in each target group\n" in lines(num_target_groups="1:2")
    assert "127.0.0.1:9090\n" in said
    assert "metrics   http://10.0.0.7:4321/metrics\n" in said
    assert "metrics" not in "".join(ready(AppArgs(), TARGET, 12.3, None))


def test_the_curl_line_is_a_command() -> None:
    said = lines(served_model_name="it's mine")
    (line,) = [line for line in said.splitlines() if "curl" in line]
    command = shlex.split(line.partition("curl")[2])
    assert command[0] == "http://127.0.0.1:8000/v1/completions"
    assert json.loads(command[-1])["model"] == "it's mine"
    assert "Authorization" not in line


@pytest.mark.parametrize("is_file", [True, False])
def test_where_a_key_is_asked_for_the_curl_line_sends_one(
    is_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_file:
        monkeypatch.setenv(KEYS_VARIABLE, "sk-of-alice-0123456789")
    said = lines(api_keys_file="keys.yaml") if is_file else lines()
    assert " -H 'Authorization: Bearer YOUR_KEY' " in said


def test_the_curl_line_trusts_the_servers_own_certificate() -> None:
    said = lines(tls_cert_file="my certs/server.pem", tls_key_file="key.pem")
    (line,) = [line for line in said.splitlines() if "curl" in line]
    _, option, path, url, *_ = shlex.split(line)[1:]
    assert (option, path) == ("--cacert", "my certs/server.pem")
    assert url.startswith("https://")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("192.0.2.7", "192.0.2.7:8000"),
        ("localhost", "localhost:8000"),
    ],
)
def test_addresses_can_be_connected_to(host: str, address: str) -> None:
    said = lines(http_host=host)
    assert f"http://{address}/v1" in said
    assert ("other machines reach it too" in said) is (host != "localhost")


def test_models_and_memory_are_named_before_the_start() -> None:
    found = FoundModel(
        name="big",
        dtype="bfloat16",
        weight_bytes=3 * GIB,
        cache_bytes=GIB,
    )
    args = AppArgs(target="big", drafter="none")
    said = list(before_start(Preflight(args=args, models=[found])))
    assert said[0] == "target: big, bfloat16, 3.0 GiB of weights and up to 1.0 GiB of KV cache"
    assert "drafter=none" in said[1]
    elsewhere = list(before_start(Preflight(args=AppArgs(target="big", draft="small"), models=())))
    assert elsewhere[:2] == ["target: big", "drafts: small"]


def test_drafters_are_named_in_their_turn() -> None:
    def drafts(**options: Any) -> str:
        said = list(before_start(Preflight(args=AppArgs(target="big", **options), models=())))
        return said[1]

    assert drafts(drafter="prompt_lookup") == "drafts: prompt_lookup"
    plainly = "drafts: none (drafter=none), so every token is decoded plainly"
    assert drafts(drafter="none") == plainly
    assert drafts(drafter="none", gamma=4) == f"{plainly}, and gamma=4 does nothing"
    assert drafts(draft="small", gamma=0) == (
        "drafts: none, as gamma=0; drafter=none would not load what drafts otherwise: small"
    )
    assert drafts(drafter="prompt_lookup,model", draft="small") == (
        "drafts: prompt_lookup; where it has none, small"
    )
