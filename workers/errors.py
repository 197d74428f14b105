"""Every error Tandem raises on purpose.

TandemError
  ConfigError                 at start: the message names the option, its value and the fix
    ModelNotFoundError        no such model id or folder
    DamagedModelError         files of the model are cut off, empty, missing or no files at all
    UnsupportedModelError     the model cannot be served by the paged attention interface
    VocabularyMismatchError   draft and target do not speak the same tokens
  InvalidRequestError         the client's request is wrong; names the field
    ModelNameError            the request names a model that is not served here
    ContextLengthError        prompt and completion do not fit the context
    RequestTooLargeError      the request has more bytes than are read
    GrammarStuckError         an output cannot be followed any further in its grammar
  AuthenticationError         the request has no API key, or one that is not valid
  OverloadedError             the waiting queue is full; carries when to come back
    RateLimitError            the key has used up what it may use for now
    QueueTimeoutError         the request has waited too long for its turn
  RequestTimeoutError         the time that the client gave its request is over
  TargetUnavailableError      no target group answered within the recovery time
  GenerationFailedError       one sequence cannot go on; the others of its batch do
  WorkerLostError             a call to a worker brought no answer; never leaves the router
    WorkerTimeoutError        no answer in time, or no worker was reached
    WorkerFailedError         a step failed by what it ran, or a call by what it carried
  KVCacheExhaustedError       no free block; never leaves a worker, which preempts instead

`deployments/api` maps these to HTTP and gRPC codes, in one table each.
"""


class TandemError(Exception):
    """Base of all errors raised on purpose; the message is fit for a client."""


class ConfigError(TandemError):
    """An option, or a combination of options, that cannot be served."""


class ModelNotFoundError(ConfigError):
    pass


class DamagedModelError(ConfigError):
    pass


class UnsupportedModelError(ConfigError):
    pass


class VocabularyMismatchError(ConfigError):
    pass


class InvalidRequestError(TandemError):
    """A request that can never succeed as it is."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        """The request field at fault, in the client's spelling; None when it is none of them."""


class ModelNameError(InvalidRequestError):
    pass


class ContextLengthError(InvalidRequestError):
    pass


class RequestTooLargeError(InvalidRequestError):
    pass


class GrammarStuckError(InvalidRequestError):
    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(
            f"the grammar cannot be followed any further: {reason}; make it simpler, or try another"
        )
        self.reason = reason
        self.is_final = is_final
        """Whether another try would end so too, as no other use of the grammar is to blame."""


class AuthenticationError(TandemError):
    pass


class OverloadedError(TandemError):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    pass


class QueueTimeoutError(OverloadedError):
    pass


class RequestTimeoutError(TandemError):
    pass


class TargetUnavailableError(TandemError):
    pass


class GenerationFailedError(TandemError):
    """One sequence cannot be continued, whoever runs it; no other is affected."""


class WorkerLostError(TandemError):
    pass


class WorkerTimeoutError(WorkerLostError):
    """No answer came in time, or no worker was reached: nothing is known of what became of it."""


class WorkerFailedError(WorkerLostError):
    """A worker's step or a call failed, and what it carried may be the cause."""


class KVCacheExhaustedError(TandemError):
    pass


def internal_error() -> TandemError:
    """What a client is told of a defect of ours, whose traceback is for the log only."""
    return TandemError("internal error; the server's log says more")


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to be quoted in one of ours.

    A line that only announces the next one is joined to it.
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{first} {others[0]}" if first.endswith(":") and others else first
