"""The bundled pair on a port of this process, in fp32, for clients that people have already.

Most of these clients are in the extra `compat`; tests of those that are not installed are skipped.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
import torch
import uvicorn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cluster import bundled
from deployments.router.chat.template import ChatTemplate
from deployments.router.health import watch_targets
from tests.deployments.loops import CACHE
from tests.deployments.serving import LocalServing, local_serving
from workers.model import load_model

# LiteLLM would fetch its list of prices as it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

MODEL = "tiny"
"""The name that `local_serving` gives its model."""
MAX_REQUEST_BYTES = 1024**2
MAX_MODEL_LEN = 512
"""A chat without max_tokens may fill it: 4,096 positions would take minutes on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, and the model behind it as transformers has it."""

    port: int
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    wait_until_nothing_is_held: Callable[[], None]
    """Raises TimeoutError if it holds a sequence or a block for long that no request needs."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """What the target alone writes."""
        with torch.inference_mode():
            output = self.reference.generate(  # type: ignore[operator]
                torch.tensor([prompt_ids]),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        tokens: list[int] = output[0, len(prompt_ids) :].tolist()
        return tokens

    def log_likelihood(self, context_ids: list[int], token_ids: list[int]) -> float:
        """The log-probability of tokens that follow a context."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([context_ids + token_ids])).logits[0]
        laws = logits.log_softmax(-1)
        first = len(context_ids) - 1
        return sum(float(laws[first + i, token]) for i, token in enumerate(token_ids))


def wait_on(loop: asyncio.AbstractEventLoop, serving: LocalServing) -> None:
    """Wait until nothing is held, from another thread than that of the server's loop."""
    asyncio.run_coroutine_threadsafe(serving.wait_until_nothing_is_held(), loop).result()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serve from a thread with an event loop of its own, as clients block."""
    torch.set_num_threads(1)
    name = bundled.resolve(bundled.TARGET_NAME)
    tokenizer = AutoTokenizer.from_pretrained(name)
    reference = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()
        is_up: Future[Callable[[], None]] = Future()
        """Its result waits until nothing is held."""

        async def serve() -> None:
            async with local_serving(
                load_model(name, dtype="float32", device="cpu"),
                draft=load_model(
                    bundled.resolve(bundled.DRAFT_NAME), dtype="float32", device="cpu"
                ),
                cache=replace(CACHE, max_model_len=MAX_MODEL_LEN),
                tokenizer=tokenizer,
                chat_template=ChatTemplate(tokenizer),
            ) as serving:
                app = serving.app(max_request_bytes=MAX_REQUEST_BYTES)
                served = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
                running = asyncio.create_task(served.serve(sockets=[listening]))
                watching = asyncio.create_task(watch_targets(serving.health, serving.targets.find))
                while not served.started:
                    await asyncio.sleep(0.01)
                loop = asyncio.get_running_loop()
                is_up.set_result(lambda: wait_on(loop, serving))
                await asyncio.to_thread(stop.wait)
                watching.cancel()
                served.should_exit = True
                await running

        thread = threading.Thread(target=asyncio.run, args=[serve()], name="compat server")
        thread.start()
        yield Server(
            port=listening.getsockname()[1],
            reference=reference,
            tokenizer=tokenizer,
            wait_until_nothing_is_held=is_up.result(timeout=60),
        )
        stop.set()
        thread.join()
