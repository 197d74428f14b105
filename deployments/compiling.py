"""A replica that answers once its forward is compiled: waiting, and saying so."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable

# Serve's own, which an operator sees: in a replica others show warnings only
logger = logging.getLogger("ray.serve")

PROGRESS_S = 10.0


async def until_compiled(
    threads: Iterable[threading.Thread], model: str, *, progress_s: float = PROGRESS_S
) -> None:
    """Wait for what `StepWorker.start_compiling` has started, and tell the log that it goes on.

    Serve's loop goes on meanwhile: the replica's constructor may take as long as it likes, but its
    process has to answer the controller.
    """
    started = time.monotonic()
    for thread in threads:
        logger.info("%s answers once its forward is compiled or loaded", model)
        while thread.is_alive():
            await asyncio.to_thread(thread.join, progress_s)
            if thread.is_alive():
                logger.info(
                    "the forward of %s is being compiled, once on this machine: %.0f s so far "
                    "(compile=auto would answer meanwhile)",
                    model,
                    time.monotonic() - started,
                )
        logger.info("%s is ready after %.0f s", model, time.monotonic() - started)
