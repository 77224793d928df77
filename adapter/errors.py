"""What can go wrong, in the words of the domain. Status codes are in frontends/status.py alone.

    AdapterError
    ├─ CallerError        the caller can mend it
    │  ├─ InvalidRequest      body, header, name or path not acceptable
    │  │  ├─ SlowBody            the body comes too slowly
    │  │  └─ MethodNotAllowed    the path exists, not with this method
    │  ├─ NotPassedThrough    a call about the whole of Triton that is not open to callers
    │  ├─ NotStarted          its body was still coming when the model, or the adapter, had to go
    │  ├─ NotTaken            the caller does not read its answers
    │  ├─ PayloadTooLarge     body over the limit
    │  ├─ InvalidModel        the package cannot be served; says what is wrong and where
    │  ├─ SourceMissing       the path given at load does not exist
    │  ├─ ModelNotFound       not loaded
    │  ├─ AlreadyLoaded       loaded, or being loaded
    │  ├─ ModelNotReady       being loaded
    │  └─ ModelTooLarge       can never fit: larger than the device
    ├─ CapacityError      the platform can mend it: evict something, then try again
    │  ├─ InsufficientMemory  does not fit: refused before trying, or undone at the limit
    │  └─ OutOfMemory         tried and failed
    ├─ TooManyConnections a listener has as many as it takes
    └─ BackendError       Triton's side
       ├─ BackendUnavailable  cannot be reached
       │  ├─ Overloaded          turns work away: a queue is full
       │  └─ TooManyAbandoned    the model is busy with what nobody waits for
       ├─ BackendTimeout      did not answer in time
       └─ ModelFailed         the model itself, maybe for lack of memory
          ├─ LoadFailed          Triton refused it
          └─ InferenceFailed     it raised
             └─ StubDied            the python process that ran it is gone
    InvalidSettings       apart: it never reaches a caller

AboutMemory is what CapacityError and ModelTooLarge share: figures.

`str(error)` is what the caller may read. The cause, where there is one, is in `__cause__`.
"""

from dataclasses import dataclass


class AdapterError(Exception):
    def __init__(self, message: str, *, model_id: str | None = None) -> None:
        super().__init__(message)
        self.model_id = model_id


class CallerError(AdapterError):
    pass


class InvalidRequest(CallerError):
    pass


class SlowBody(InvalidRequest):
    pass


class MethodNotAllowed(InvalidRequest):
    """`allowed`: the methods of the path, as the header Allow has them."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class NotPassedThrough(CallerError):
    pass


class TooManyConnections(AdapterError):
    pass


class NotStarted(CallerError):
    """No work has begun, so that the request may be sent anywhere else."""


class NotTaken(CallerError):
    """What is still answered is dropped: nobody waits for a caller who does not read."""


class PayloadTooLarge(CallerError):
    pass


class MessageTooLarge(PayloadTooLarge):
    """Over gRPC, which has a code of its own for it."""


class InvalidModel(CallerError):
    pass


class SourceMissing(CallerError):
    pass


class ModelNotFound(CallerError):
    pass


class AlreadyLoaded(CallerError):
    pass


class ModelNotReady(CallerError):
    pass


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes as the ledger or the failing allocator knew them; None where nobody knew.

    `device` is the one that free and limit are about, None when they are about all of them.
    """

    needed_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    device: str | None = None


class AboutMemory(AdapterError):
    """`matched` is the phrase of the failure text that means out of memory, `pattern` the name of
    the rule that found it; None when refused. `was_tried`: Triton had begun with the load.
    """

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        figures: MemoryFigures | None = None,
        matched: str | None = None,
        pattern: str | None = None,
        was_tried: bool = False,
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.figures = figures or MemoryFigures()
        self.was_tried = was_tried
        self.matched = matched
        self.pattern = pattern


class ModelTooLarge(CallerError, AboutMemory):
    """Not CapacityError: the platform would evict one model after the other for nothing."""


class CapacityError(AboutMemory):
    pass


class InsufficientMemory(CapacityError):
    pass


class OutOfMemory(CapacityError):
    pass


class BackendError(AdapterError):
    pass


class BackendUnavailable(BackendError):
    """`delivered` is False when the call surely never reached Triton, so it may be sent again."""

    def __init__(self, message: str, *, model_id: str | None = None, delivered: bool) -> None:
        super().__init__(message, model_id=model_id)
        self.delivered = delivered


class Overloaded(BackendUnavailable):
    pass


class TooManyAbandoned(BackendUnavailable):
    pass


class BackendTimeout(BackendError):
    pass


class ModelFailed(BackendError):
    """`suspected` is the phrase of the failure text that may mean out of memory, where one may.

    The text cannot tell; an observation of the memory at that time can (core/evidence.py): with
    `of_shm` one of /dev/shm alone.
    """

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        suspected: str | None = None,
        of_shm: bool = False,
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.suspected = suspected
        self.of_shm = of_shm


class LoadFailed(ModelFailed):
    pass


class InferenceFailed(ModelFailed):
    pass


class StubDied(InferenceFailed):
    pass


def was_refused(error: AdapterError) -> bool:
    """Nothing was tried and nothing has failed: callers or the platform mend that by themselves."""
    if isinstance(error, AboutMemory) and error.was_tried:
        return False
    return isinstance(error, CallerError | InsufficientMemory)


class InvalidSettings(Exception):
    """All problems at once, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
