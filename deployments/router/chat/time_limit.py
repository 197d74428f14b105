"""Running foreign code off the event loop that can be made to end: a chat template may loop."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")


class _Interruption(BaseException):
    """Raised within a thread that has to end; no handler of errors catches it."""


async def run_within(timeout_s: float, function: Callable[[], ResultT]) -> ResultT:
    """The function's result, or its error, from a thread of its own.

    Raises TimeoutError after `timeout_s` seconds. The thread is then made to end, as it is when the
    caller is cancelled, at the next instruction of Python that it runs. It has to be a thread that
    nobody else uses: an interruption that comes late then hits nothing.
    """
    result: Future[ResultT] = Future()
    result.set_running_or_notify_cancel()  # nobody may cancel what the thread will set
    thread = threading.Thread(
        target=_run, args=(function, result), name="chat-template", daemon=True
    )
    thread.start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(result)
    finally:
        if not result.done():
            _interrupt(thread)


def _run(function: Callable[[], ResultT], result: Future[ResultT]) -> None:
    with suppress(_Interruption):
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)


def _interrupt(thread: threading.Thread) -> None:
    """Raise _Interruption in the thread, unless it has ended."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Interruption)
    )
