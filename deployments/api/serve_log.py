"""What a replica of Serve logs: requests, but no probes, and no tracebacks of what is no defect.

A stream can end with a status only by an exception, which Serve logs with two tracebacks. Of a
request whose client has left, its proxy forgets a task, of which asyncio then complains; and gRPC
does, of an answer that is sent as its call's deadline passes. Defects of ours are logged where they
are found (`api/grpc.py`).
"""

import logging
import sys

import grpc
from ray.serve.exceptions import RequestCancelledError, gRPCStatusError

SERVE_LOGGER = "ray.serve"
ASYNCIO_LOGGER = "asyncio"
GRPC_LOGGER = "grpc._cython.cygrpc"
PROBE = "/grpc.health.v1.Health/Check"


def leave_out_told_errors() -> None:
    """Have this process log no probes, and no errors of which clients were told, from now on."""
    for name in (SERVE_LOGGER, ASYNCIO_LOGGER, GRPC_LOGGER):
        logging.getLogger(name).addFilter(_is_news)  # once, however often it is added


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, gRPCStatusError | RequestCancelledError) or _is_too_late(error):
        return False
    is_access = getattr(record, "serve_access_log", False)
    return not (is_access and PROBE in record.getMessage())


def _is_too_late(error: BaseException | None) -> bool:
    """Whether an answer found its call over; gRPC has another message for a batch that is wrong."""
    return isinstance(error, grpc.aio.InternalError) and 'Failed "execute_batch"' in str(error)


def write_request_log(name: str) -> None:
    """Have this process write the log of requests, a logger's messages, to its standard error."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
