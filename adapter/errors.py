"""Everything that can go wrong, in the words of the domain. Status codes are in
frontends/status.py.

    AdapterError
    ├─ CallerError        the caller can fix it
    │  ├─ InvalidRequest      body, header, name or path not acceptable
    │  │  ├─ InvalidCall         a call of the endpoint, judged before its model is asked
    │  │  │  └─ UnknownOperation    unknown path or method of the endpoint
    │  │  ├─ BrokenBody          the body ends early, stops coming, or is malformed
    │  │  ├─ SlowBody            the body comes too slowly
    │  │  ├─ IncompleteMessage   a gRPC request ended before its message did
    │  │  ├─ AlreadyRegistered   Triton has a region of shared memory of this name
    │  │  ├─ UnknownEncoding     a gRPC message with an unknown compression
    │  │  ├─ NotJson             a body that must be JSON is not
    │  │  ├─ UnsupportedMediaType  the model takes no body of this content type
    │  │  ├─ NotAcceptable       the model's answer cannot be of any type that the caller accepts
    │  │  └─ MethodNotAllowed    the path exists, not with this method
    │  ├─ Forbidden           sent by a page of another site, to a name that is not ours, unsigned
    │  │  └─ InvalidSignature    a call of the endpoint is signed wrongly
    │  ├─ Unauthenticated     a control call without the token, or with another
    │  ├─ InferenceOnly       the listener serves inference only
    │  ├─ InlineFilesOff      a load brings files, which the setting forbids
    │  ├─ NotPassedThrough    a call about the whole of Triton, closed to callers
    │  ├─ NotStarted          its body was still arriving at an unload or stop
    │  ├─ NotTaken            the caller does not read its answers
    │  ├─ PayloadTooLarge     body over the limit
    │  ├─ InvalidModel        the package cannot be served; says what is wrong and where
    │  │  └─ InvalidArtifact     what the store has of it cannot even be unpacked
    │  ├─ SourceMissing       the path given at load does not exist
    │  ├─ ModelNotFound       not loaded
    │  ├─ ArtifactNotFound    the store has no model of this key
    │  ├─ NotRegistered       Triton has no region of shared memory of this name
    │  ├─ AlreadyLoaded       loaded, or being loaded
    │  ├─ ModelNotReady       being loaded
    │  ├─ UnloadedMeanwhile   unloaded while it was being loaded
    │  └─ ModelTooLarge       can never fit: larger than the device
    ├─ CapacityError      the platform can fix it: evict something, then try again
    │  ├─ InsufficientMemory  does not fit: refused before trying, or undone at the limit
    │  └─ OutOfMemory         tried and failed
    ├─ TooManyConnections a listener has all it can have
    ├─ TooManyWaiting     too many callers wait for models
    │  └─ TooManyStreams      too many streams are open
    ├─ NoRoom             everything evictable, in memory or on disk, is in use
    ├─ StoreDenied        the store refuses our credentials
    ├─ StoreUnavailable   the store cannot be reached, or fails
    └─ BackendError       Triton's side
       ├─ BackendUnavailable  cannot be reached
       │  └─ Overloaded          turns work away: a queue is full
       ├─ BackendTimeout      did not answer in time
       └─ ModelFailed         the model itself, maybe for lack of memory
          ├─ LoadFailed          Triton refused it
          │  └─ GivenUp             it may crash Triton
          └─ InferenceFailed     it raised
             └─ StubDied            the python process that ran it is gone
    InvalidSettings       apart: it never reaches a caller

AboutMemory is what CapacityError and ModelTooLarge share: figures.

`str(error)` is what the caller may read. The cause, where there is one, is in `__cause__`.
"""

from dataclasses import dataclass


class AdapterError(Exception):
    """`is_logged`: the line of the load or unload that failed with it has said so at its level.
    `is_of_fetch`: the files of the model could not be fetched, of which the history knows.
    `own_code`: the gRPC code that the model chose; callers over gRPC get it as it is.
    """

    is_logged = False
    is_of_fetch = False
    own_code: str | None = None

    def __init__(self, message: str, *, model_id: str | None = None) -> None:
        super().__init__(message)
        self.model_id = model_id


class CallerError(AdapterError):
    pass


class InvalidRequest(CallerError):
    pass


class InvalidCall(InvalidRequest):
    """The endpoint refuses it, as a platform does before a container has seen the request."""


class UnknownOperation(InvalidCall):
    pass


class BrokenBody(InvalidRequest):
    pass


class SlowBody(InvalidRequest):
    pass


class IncompleteMessage(InvalidRequest):
    """Over gRPC, which has a code of its own for it."""


class AlreadyRegistered(InvalidRequest):
    pass


class UnknownEncoding(InvalidRequest):
    pass


class NotJson(InvalidRequest):
    pass


class UnsupportedMediaType(InvalidRequest):
    """`accepted`: the types that are, as the header Accept has them."""

    def __init__(self, message: str, *, accepted: str) -> None:
        super().__init__(message)
        self.accepted = accepted


class NotAcceptable(InvalidRequest):
    pass


class MethodNotAllowed(InvalidRequest):
    """`allowed`: the methods of the path, as the header Allow has them."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class Forbidden(CallerError):
    pass


class InvalidSignature(Forbidden):
    pass


class Unauthenticated(CallerError):
    """`is_wrong`: there was a token, and it is another."""

    def __init__(self, message: str, *, is_wrong: bool) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


class InferenceOnly(CallerError):
    pass


class InlineFilesOff(CallerError):
    pass


class NotPassedThrough(CallerError):
    pass


class TooManyConnections(AdapterError):
    pass


class TooManyWaiting(AdapterError):
    """`retry_after_ms`: when the caller had better come again."""

    def __init__(
        self, message: str, *, model_id: str | None = None, retry_after_ms: int = 1000
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.retry_after_ms = retry_after_ms


class TooManyStreams(TooManyWaiting):
    pass


class NoRoom(AdapterError):
    """Refuses a model while all that could leave memory or disk for it is in use."""

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        retry_after_ms: int = 1000,  # when the caller had better come again
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.retry_after_ms = retry_after_ms


class StoreDenied(AdapterError):
    pass


class StoreUnavailable(AdapterError):
    pass


class NotStarted(CallerError):
    """No work has begun, so that the request may be sent anywhere else."""


class NotTaken(CallerError):
    """The caller does not read its answer, whose rest is dropped."""


class PayloadTooLarge(CallerError):
    pass


class MessageTooLarge(PayloadTooLarge):
    """Over gRPC, which has a code of its own for it."""


class InvalidModel(CallerError):
    pass


class InvalidArtifact(InvalidModel):
    """The store failed: no container has seen the model."""


class SourceMissing(CallerError):
    pass


class ModelNotFound(CallerError):
    pass


class ArtifactNotFound(CallerError):
    pass


class NotRegistered(CallerError):
    pass


class AlreadyLoaded(CallerError):
    pass


class ModelNotReady(CallerError):
    pass


class UnloadedMeanwhile(CallerError):
    pass


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes as the ledger or the failing allocator knew them; None where nobody knew.

    `device` is the one that free and limit are about, None when they are about all of them. Free
    is what the next load could have, as `Ledger.free` counts it.
    """

    needed_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    device: str | None = None
    # a bound: a load that was ended or has failed with this much needs more, nobody knows how much
    needs_more_than_bytes: int | None = None


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
    """`elsewhere`: the figures of the other GPUs that would do as well. `is_known`: the need is
    learned or declared.
    """

    elsewhere: tuple[MemoryFigures, ...] = ()
    is_known = False


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


class GivenUp(LoadFailed):
    """It may be what ended Triton, again and again."""


class InferenceFailed(ModelFailed):
    pass


class StubDied(InferenceFailed):
    pass


def was_refused(error: AdapterError) -> bool:
    """Nothing was tried and nothing has failed: callers or the platform fix that by themselves."""
    if isinstance(error, AboutMemory) and error.was_tried:
        return False
    return isinstance(error, CallerError | InsufficientMemory | TooManyWaiting)


def was_not_started(error: AdapterError) -> bool:
    """Return whether Triton surely had nothing of the request, so that another machine may be
    asked.
    """
    if isinstance(error, BackendUnavailable):
        return not error.delivered
    return isinstance(error, _NOT_STARTED)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error that was answered, and of its causes. Their frames hold what
    the request has brought, and refer to the error again: what is large would stay until Python's
    garbage collector looks at all that is old, which it seldom does. So would an error that is its
    own cause, as one is that was raised once more. Each frontend calls this in one place, where it
    logs the error.
    """
    error.__traceback__ = None
    if error.__cause__ is None and error.__context__ is None:
        return
    seen, chain = {id(error)}, [error]
    while chain:
        one = chain.pop()
        one.__traceback__ = None
        links = one.__cause__, one.__context__
        one.__cause__, one.__context__ = (None if id(link) in seen else link for link in links)
        for link in links:
            if link is not None and id(link) not in seen:
                seen.add(id(link))
                chain.append(link)


_NOT_STARTED = (NotStarted, NoRoom, StoreUnavailable, TooManyConnections, TooManyWaiting)


class InvalidSettings(Exception):
    """Lists all problems, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
