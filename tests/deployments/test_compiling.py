"""A replica whose forward is compiled, without Serve: what is served before, and from when on."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deployments.args import AppArgs
from deployments.compiling import until_compiled
from deployments.replicas.worker_replica import WorkerReplica
from deployments.transport.messages import VERIFY
from tests.fakes import answer_of
from tests.tiny_models import save_model
from workers.cpu import compiled_step
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.step_inputs import StepInputs
from workers.target import Target
from workers.types import VerifyRequest, VerifyResult

PATIENCE_S = 20.0
NUM_TOKENS = 12


class Replica(WorkerReplica[VerifyRequest, VerifyResult]):
    @classmethod
    async def start(cls, model: Model, compile: str) -> "Replica":
        replica = cls()
        await replica._start(
            AppArgs.model_validate({"compile": compile}),
            lambda: Target(model, CacheOptions(block_size=4, max_num_seqs=4)),
            VERIFY,
            role="target",
        )
        return replica

    async def text(self, seq_id: str) -> list[int]:
        """A text of the same prompt, parameters and seed each time."""
        tokens, cached_len = [5, 9, 31, 7], 0
        while len(tokens) < 4 + NUM_TOKENS:
            request = VerifyRequest(
                seq_id=seq_id,
                base_len=cached_len,
                new_tokens=tuple(tokens[cached_len:]),
                prompt_len=4,
                sampling=SamplingParams(temperature=0.8),
                seed=3,
                cache_salt=seq_id,
            )
            async with asyncio.timeout(PATIENCE_S):
                (result,) = (await self._thread.run(answer_of(self._loop, [request]))).results
            cached_len = len(tokens)
            tokens += result.tokens
        return tokens[4:]

    async def close(self) -> None:
        self._thread.call_soon(self._server.close)
        await self._thread.run(self._loop.close())
        self._thread.stop()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load_model(save_model(tmp_path), dtype="float32", device="cpu")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Ends when it is set, with a forward whose near ties fall otherwise, as it were."""
    may_end = threading.Event()

    def obtain(model: Model, **_: object) -> Callable[[StepInputs], torch.Tensor]:
        assert may_end.wait(PATIENCE_S)
        return lambda inputs: model.forward(inputs).roll(1, dims=1)

    monkeypatch.setattr(compiled_step, "obtain", obtain)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="replica"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    return may_end


async def test_what_waits_for_its_compiled_forward_has_one_text(
    model: Model, compiler: threading.Event
) -> None:
    starting = asyncio.create_task(Replica.start(model, "wait"))
    await asyncio.sleep(0.3)
    assert not starting.done()
    compiler.set()
    replica = await asyncio.wait_for(starting, PATIENCE_S)
    status = await replica.status()
    assert (status.is_compiling, status.is_compiled, status.warnings) == (False, True, ())
    assert await replica.text("at once") == await replica.text("later")
    await replica.close()


async def test_what_does_not_wait_may_have_another_text_before(
    model: Model, compiler: threading.Event
) -> None:
    replica = await asyncio.wait_for(Replica.start(model, "auto"), PATIENCE_S)
    status = await replica.status()
    assert (status.is_compiling, status.is_compiled) == (True, False)
    at_once = await replica.text("at once")
    compiler.set()
    async with asyncio.timeout(PATIENCE_S):
        while (await replica.status()).is_compiling:
            await asyncio.sleep(0.01)
    assert (await replica.status()).is_compiled
    assert await replica.text("later") != at_once
    await replica.close()


@pytest.mark.parametrize("compile", ["wait", "auto"])
async def test_a_forward_that_cannot_be_had_is_told(
    compile: str,
    model: Model,
    compiler: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler.set()
    monkeypatch.setattr(compiled_step, "obtain", lambda *_, **__: None)
    replica = await asyncio.wait_for(Replica.start(model, compile), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while (await replica.status()).is_compiling:
            await asyncio.sleep(0.01)
    status = await replica.status()
    assert not status.is_compiled
    (warning,) = status.warnings
    assert "has no compiled forward here, so its steps are slower" in warning
    if compile == "wait":
        assert warning in caplog.text
    assert await replica.text("at once") == await replica.text("later")
    await replica.close()


async def test_the_log_tells_how_long_it_has_been(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    may_end = threading.Event()
    threads: Sequence[threading.Thread] = [
        threading.Thread(target=may_end.wait, args=[PATIENCE_S], daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    waiting = asyncio.create_task(until_compiled(threads, "some-model", progress_s=0.01))
    async with asyncio.timeout(PATIENCE_S):
        while caplog.text.count("the forward of some-model is being compiled") < 3:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    may_end.set()
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert "some-model is ready after" in caplog.text
