"""Serve's log without tracebacks of errors that a gRPC client was told of with a status.

A stream can end with a status only by an exception, which Serve logs with two tracebacks, as if it
were a defect. Defects of ours are logged where they are found (`api/grpc.py`).
"""

import logging

from ray.serve.exceptions import gRPCStatusError

SERVE_LOGGER = "ray.serve"


def leave_out_told_errors() -> None:
    """Have this process's Serve not log them, from now on."""
    logger = logging.getLogger(SERVE_LOGGER)
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, gRPCStatusError)
