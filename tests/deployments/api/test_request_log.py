"""The log of requests: a line for each, without texts or keys."""

import json
import logging

import pytest

from deployments.router.request import Caller
from deployments.router.request_log import RequestLog
from deployments.router.tenants.keys import Keys, Tenant
from tests.deployments.api.keys import BEARER, ring_of
from tests.deployments.loops import Models
from tests.deployments.serving import (
    body,
    client_of,
    complete,
    generation_request,
    local_serving,
    stream,
)


class TestLog:
    async def test_each_request_is_one_line_without_texts_or_keys(
        self, models: Models, caplog: pytest.LogCaptureFixture
    ) -> None:
        lines: list[str] = []
        keys, log = Keys(ring_of(requests_per_second=100)), RequestLog(lines.append)
        async with (
            local_serving(models.target, keys=keys, log=log) as serving,
            client_of(serving) as client,
        ):
            client.headers.update({**BEARER, "X-Request-Id": "r-7"})
            with caplog.at_level(logging.DEBUG):
                answer = await complete(client, prompt="Secrets", n=2)
                await stream(client, prompt="Secrets", temperature=0)
                await client.post("/v1/completions", json=body(prompt="x" * 256))
            client.headers.pop("X-Request-Id")
            serving.targets.delay_s = 0.2
            request = generation_request(max_tokens=200)
            caller = Caller(tenant=Tenant(name="alice"))
            async with serving.service.open(request, caller) as generation:
                await anext(generation.run())
            await client.post(
                "/v1/completions",
                json=body(max_tokens=200),
                headers={"x-request-timeout-seconds": "0.1"},
            )
        whole, streamed, refused, left, late = map(json.loads, lines)
        assert whole["outcome"] == streamed["outcome"] == "finished"
        assert (whole["key"], whole["request_id"]) == ("alice", "r-7")
        assert answer["id"] == f"cmpl-{whole['id']}"
        assert (whole["num_choices"], whole["num_prompt_tokens"]) == (2, 7)
        assert whole["num_completion_tokens"] == 24
        assert 0 <= whole["alpha"] <= 1 <= whole["tau"]
        for line in (whole, streamed):
            parts = line["queue_s"] + line["prefill_s"] + line["decode_s"]
            assert parts <= line["total_s"] + 1e-4
            assert line["first_token_s"] == pytest.approx(
                line["queue_s"] + line["prefill_s"],
                abs=2e-6,  # each is rounded
            )
        assert (refused["outcome"], refused["error"]) == ("refused", "ContextLengthError")
        assert "id" not in refused
        assert (left["outcome"], left["key"]) == ("cancelled", "alice")
        assert "request_id" not in left
        assert (late["outcome"], late["error"]) == ("failed", "RequestTimeoutError")
        everything = "\n".join([*lines, caplog.text])
        for word in ("Secrets", "sk-", answer["choices"][0]["text"]):
            assert word not in everything
