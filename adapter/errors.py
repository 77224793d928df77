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
       │  └─ Overloaded          it, a model or the adapter turns work away
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
    """Describes a failure to whoever caused it, or can mend it."""

    # the line of the load or unload that failed has shown it in the log already
    is_logged = False
    # the files of the model could not be fetched; the history has an entry of that
    is_of_fetch = False
    # the gRPC code that the model chose; callers over gRPC get it as it is
    own_code: str | None = None

    def __init__(self, message: str, *, model_id: str | None = None) -> None:
        super().__init__(message)
        self.model_id = model_id


class CallerError(AdapterError):
    """Tells a caller of what he can mend himself: his request, or the model that he names."""


class InvalidRequest(CallerError):
    """Refuses a body, header, name or path that is not acceptable."""


class InvalidCall(InvalidRequest):
    """Refuses a call of the endpoint, as a platform does before a container has seen it."""


class UnknownOperation(InvalidCall):
    """Refuses a path or method that the endpoint does not have."""


class BrokenBody(InvalidRequest):
    """Refuses a body that ends early, stops coming, or is malformed."""


class SlowBody(InvalidRequest):
    """Refuses a body that comes too slowly."""


class IncompleteMessage(InvalidRequest):
    """Refuses a gRPC request that ended before its message did; gRPC has a code for that."""


class AlreadyRegistered(InvalidRequest):
    """Refuses a region of shared memory whose name Triton has already."""


class UnknownEncoding(InvalidRequest):
    """Refuses a gRPC message that is compressed in an unknown way."""


class NotJson(InvalidRequest):
    """Refuses a body that must be JSON and is not."""


class UnsupportedMediaType(InvalidRequest):
    """Refuses a body whose content type the model does not accept."""

    def __init__(
        self,
        message: str,
        *,
        accepted: str,  # the accepted types, as the header Accept has them
    ) -> None:
        super().__init__(message)
        self.accepted = accepted


class NotAcceptable(InvalidRequest):
    """Refuses a request for whose answer the caller accepts no type that the model has."""


class MethodNotAllowed(InvalidRequest):
    """Refuses a method that its path does not have."""

    def __init__(
        self,
        message: str,
        *,
        allowed: str,  # the methods of the path, as the header Allow has them
    ) -> None:
        super().__init__(message)
        self.allowed = allowed


class Forbidden(CallerError):
    """Refuses a call that another site's page has sent, that names another host, or is unsigned."""


class InvalidSignature(Forbidden):
    """Refuses a call of the endpoint that is signed wrongly."""


class Unauthenticated(CallerError):
    """Refuses a control call that has no token, or another one."""

    def __init__(
        self,
        message: str,
        *,
        is_wrong: bool,  # there was a token, and it is another one
    ) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


class InferenceOnly(CallerError):
    """Refuses a control call at a listener that serves inference only."""


class InlineFilesOff(CallerError):
    """Refuses a load that brings files, where the setting `inline_files` forbids them."""


class NotPassedThrough(CallerError):
    """Refuses a call about the whole of Triton that the setting `passthrough` does not open."""


class TooManyConnections(AdapterError):
    """Refuses a connection because its listener has all that it can have."""


class TooManyWaiting(AdapterError):
    """Refuses a call because too many callers wait for models, or for room for their bytes."""

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        retry_after_ms: int = 1000,  # when the caller had better come again
        has_begun: bool = False,  # Triton may have requests of the call
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.retry_after_ms = retry_after_ms
        self.has_begun = has_begun


class TooManyStreams(TooManyWaiting):
    """Refuses a stream, or ends an open one."""


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
    """Tells that a store refuses the adapter's credentials."""


class StoreUnavailable(AdapterError):
    """Tells that a store cannot be reached, or fails."""


class NotStarted(CallerError):
    """Refuses a request on which no work has begun, so that it may be sent anywhere else."""


class NotTaken(CallerError):
    """Ends a request whose caller does not read the answer; the rest of it is dropped."""


class PayloadTooLarge(CallerError):
    """Refuses a body that is over the limit."""


class MessageTooLarge(PayloadTooLarge):
    """Refuses a gRPC message that is over the limit; gRPC has a code for that."""


class InvalidModel(CallerError):
    """Refuses a package that cannot be served; the text says what is wrong and where."""


class InvalidArtifact(InvalidModel):
    """Refuses what a store has of a model and cannot even be unpacked. No container has seen it."""


class SourceMissing(CallerError):
    """Refuses a load because there is nothing at the path that it names."""


class ModelNotFound(CallerError):
    """Tells that the model is not loaded."""


class ArtifactNotFound(CallerError):
    """Tells that the store has no model of this key."""


class NotRegistered(CallerError):
    """Tells that Triton has no region of shared memory of this name."""


class AlreadyLoaded(CallerError):
    """Refuses the load of a model that is loaded, or being loaded."""


class ModelNotReady(CallerError):
    """Tells that the model is still being loaded."""


class UnloadedMeanwhile(CallerError):
    """Tells that the model was unloaded while it was being loaded."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Holds bytes as the ledger or the failing allocator knew them; None where nobody knew."""

    needed_bytes: int | None = None
    free_bytes: int | None = None  # for the next load, as `Ledger.free` counts
    limit_bytes: int | None = None
    device: str | None = None  # whose free bytes and limit these are; None if of all devices
    # a bound: a load that was ended or has failed with this much needs more, nobody knows how much
    needs_more_than_bytes: int | None = None


class AboutMemory(AdapterError):
    """Gives the figures of a lack of memory."""

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        figures: MemoryFigures | None = None,
        matched: str | None = None,  # the phrase of Triton's text that means out of memory
        pattern: str | None = None,  # the name of the rule that found the phrase
        was_tried: bool = False,  # Triton had begun with the load
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.figures = figures or MemoryFigures()
        self.was_tried = was_tried
        self.matched = matched
        self.pattern = pattern


class ModelTooLarge(CallerError, AboutMemory):
    """Refuses a model that can never fit, as it is larger than the device.

    It is no CapacityError, for which a platform would evict one model after the other for nothing.
    """


class CapacityError(AboutMemory):
    """Tells a platform that the model would fit after it has unloaded another one."""

    elsewhere: tuple[MemoryFigures, ...] = ()  # of the other GPUs that would do as well
    is_known = False  # the need is learned or declared


class InsufficientMemory(CapacityError):
    """Refuses a load that does not fit: before a try, or because more was used than a limit."""


class OutOfMemory(CapacityError):
    """Tells that a load or an inference was tried and ran out of memory."""


class BackendError(AdapterError):
    """Tells of a failure on Triton's side."""


class BackendUnavailable(BackendError):
    """Tells that Triton cannot be reached."""

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        delivered: bool,  # False if the call surely never reached Triton, and may be sent again
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.delivered = delivered


class Overloaded(BackendUnavailable):
    """Tells that work is turned away, by whom the text says.

    By Triton: a queue of the model is full, or the request was in it for too long. By a model, with
    UNAVAILABLE. By the adapter: too many loads and unloads are in progress (control/operations.py),
    or the byte budget has no room for a gRPC request (relay/session.py).
    """


class BackendTimeout(BackendError):
    """Tells that Triton did not answer in time."""


class ModelFailed(BackendError):
    """Tells that the model itself failed, maybe for lack of memory.

    The text alone cannot tell that; a reading of the memory at that time can (core/evidence.py).
    """

    def __init__(
        self,
        message: str,
        *,
        model_id: str | None = None,
        suspected: str | None = None,  # the phrase of the text that may mean out of memory
        of_shm: bool = False,  # a reading of /dev/shm is what counts
    ) -> None:
        super().__init__(message, model_id=model_id)
        self.suspected = suspected
        self.of_shm = of_shm


class LoadFailed(ModelFailed):
    """Tells that Triton refused a load."""


class GivenUp(LoadFailed):
    """Refuses a model that may be what ended Triton, again and again."""


class InferenceFailed(ModelFailed):
    """Tells that the model raised an error in an inference."""


class StubDied(InferenceFailed):
    """Tells that the python process that ran the inference is gone."""


def was_refused(error: AdapterError) -> bool:
    """Return whether nothing was tried and nothing has failed: callers or the platform mend that
    by themselves.
    """
    if isinstance(error, AboutMemory) and error.was_tried:
        return False
    return isinstance(error, _REFUSED)


def was_not_started(error: AdapterError) -> bool:
    """Return whether Triton surely had nothing of the request, so that another machine may be
    asked.
    """
    if isinstance(error, BackendUnavailable):
        return not error.delivered
    if isinstance(error, TooManyWaiting):
        return not error.has_begun
    return isinstance(error, _NOT_STARTED)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error that was answered, and of its causes. Their frames hold what
    the request has brought, and refer to the error again: what is large would stay until Python's
    garbage collector looks at all that is old, which it seldom does. So would an error that is its
    own cause, as one is that was raised once more. Each frontend of callers calls this in one
    place, where it logs the error.
    """
    error.__traceback__ = None
    if error.__cause__ is None and error.__context__ is None:
        return
    seen = {id(error)}
    chain = [error]
    while chain:
        one = chain.pop()
        one.__traceback__ = None
        links = one.__cause__, one.__context__
        one.__cause__, one.__context__ = (None if id(link) in seen else link for link in links)
        for link in links:
            if link is not None and id(link) not in seen:
                seen.add(id(link))
                chain.append(link)


_REFUSED = (CallerError, InsufficientMemory, TooManyWaiting)
_NOT_STARTED = (NotStarted, NoRoom, StoreUnavailable, TooManyConnections)


class InvalidSettings(Exception):
    """Lists all problems, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
