"""Running foreign code off the event loop that can be made to end: a chat template may loop."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

ResultT = TypeVar("ResultT")


class _Interruption(BaseException):
    """Raised within a thread that has to end; no handler of errors catches it."""


async def run_within(timeout_s: float, function: Callable[[], ResultT]) -> ResultT:
    """The function's result, or its error, from a thread of its own.

    Raises TimeoutError after `timeout_s` seconds. The thread is then made to end, as it is when the
    caller is cancelled, at the next instruction of Python that it runs. An interruption that comes
    late hits nothing: nobody else uses the thread, and none is sent when the result is there.
    """
    result: Future[ResultT] = Future()
    result.set_running_or_notify_cancel()  # nobody may cancel what the thread will set
    ending = threading.Lock()
    thread = threading.Thread(
        target=_run, args=(function, result, ending), name="chat-template", daemon=True
    )
    thread.start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(result)
    finally:
        with ending:
            if not result.done():
                _interrupt(thread)


def _run(function: Callable[[], ResultT], result: Future[ResultT], ending: threading.Lock) -> None:
    with suppress(_Interruption):
        settle = _outcome(function, result)
        with ending:
            settle()


def _outcome(function: Callable[[], ResultT], result: Future[ResultT]) -> Callable[[], None]:
    """Call the function; returns what tells the result."""
    try:
        return partial(result.set_result, function())
    except _Interruption:
        raise
    except Exception as error:
        return partial(result.set_exception, error)
    except BaseException as error:  # such as a panic of Rust's; it may end no task of the caller's
        return partial(result.set_exception, RuntimeError(f"it has ended by {error!r}"))


def _interrupt(thread: threading.Thread) -> None:
    """Raise _Interruption in the thread, which has not ended."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Interruption)
    )
