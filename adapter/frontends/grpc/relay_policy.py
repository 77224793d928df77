"""The policy of the gRPC relay: which calls go to Triton directly, and how errors are worded.

ModelInfer does, of a ready model that Triton knows by the client's name. All else goes to the
fallback server, a grpc.aio server of this process behind a Unix socket.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping
from functools import partial

import grpc
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2
from adapter.control.door import Lease, Models, TritonState, WaitForLease
from adapter.core.model import ModelId, parse_model_id
from adapter.core.triton_errors import Faults
from adapter.core.triton_input import HeaderTable
from adapter.errors import (
    AdapterError,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    IncompleteMessage,
    InferenceFailed,
    InvalidRequest,
    MessageTooLarge,
    NotStarted,
    Overloaded,
    SlowBody,
    UnknownEncoding,
)
from adapter.frontends.grpc.calls import LOAD, CountedRequest, GrpcCalls, trailers_of
from adapter.frontends.grpc.messages import parse_name
from adapter.frontends.grpc.parameters import check_parameters
from adapter.frontends.grpc.v2 import SERVICE
from adapter.frontends.status import grpc_status
from adapter.relay.headers import Headers
from adapter.relay.policy import ENCODINGS, Reason, RelayError, Status
from adapter.relay.protobuf import Malformed
from adapter.runtime import clock
from adapter.telemetry.log import ids_of_headers

_METHOD = "ModelInfer"
_PATH = f"/{SERVICE}/{_METHOD}".encode()
_LOAD_PATH = f"/{SERVICE}/{LOAD}".encode()
# methods with one request and one answer
_UNARY = frozenset(
    f"/{service.full_name}/{method.name}".encode()
    for file in (v2.DESCRIPTOR, model_runtime_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
)
_MESH = b"mm-model-id"
_MESH_BINARY = b"mm-model-id-bin"
_EXTERNAL = HeaderTable("--grpc-header-forward-pattern", None)
# what makes a request one of gRPC; the deadline and ModelMesh's metadata are kept here
_FOR_TRITON = frozenset(
    {
        *(b":authority", b":method", b":path", b":scheme", b"content-type", b"te", b"user-agent"),
        b"grpc-accept-encoding",
    }
)
_OF_GRPC = (b":", b"grpc-", b"mm-")
_CODES = {code.value[0]: code for code in grpc.StatusCode}

_ERRORS: Mapping[Reason, Callable[[str], AdapterError]] = {
    Reason.INVALID: InvalidRequest,
    Reason.ENCODING: UnknownEncoding,
    Reason.TOO_LARGE: MessageTooLarge,
    Reason.INCOMPLETE: IncompleteMessage,
    Reason.SLOW: SlowBody,
    Reason.NOT_STARTED: NotStarted,
    Reason.OVERLOADED: partial(Overloaded, delivered=False),
    Reason.UNREACHABLE: partial(BackendUnavailable, delivered=False),
    Reason.BROKEN: partial(BackendUnavailable, delivered=True),
    Reason.LATE: BackendTimeout,
    Reason.ODD_ANSWER: InferenceFailed,
}
_ACCEPTED: Headers = ((b"grpc-accept-encoding", b",".join(ENCODINGS)),)


class RelayPolicy:
    """Decides for one listener which calls go to Triton directly.

    Where calls load models, metadata with the name that the message has is for a proxy, and no
    mesh's.
    """

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        faults: Faults,
        calls: GrpcCalls,
        *,
        # whether calls may go to Triton directly: they need neither a span nor a look at who sends
        # them, which they get in the fallback server
        is_direct: bool = True,
        load_wait_seconds: float = 0,  # as in V2Service
        on_demand: WaitForLease | None = None,  # has models loaded for calls
        takes_cancels: Callable[[], bool] = bool,  # whether Triton survives the cancel of a call
        metadata: HeaderTable = _EXTERNAL,  # decides which metadata Triton gets
        shares_memory: bool = False,  # as in V2Call
    ) -> None:
        self._models = models
        self.triton = triton
        self.faults = faults
        self.calls = calls
        self.served = calls.served(_METHOD)
        self._is_direct = is_direct
        self._load_wait_seconds = load_wait_seconds
        self._loads_on_demand = on_demand is not None
        self._wait_for_lease = on_demand or models.wait_for_lease
        self.takes_cancels = takes_cancels
        self._metadata = metadata
        self.shares_memory = shares_memory

    def is_forwarded(self, header: bytes) -> bool:
        """Return whether Triton gets a header of the client's: those that gRPC needs, and metadata
        that the setting lets through.
        """
        if header.startswith(_OF_GRPC):
            return header in _FOR_TRITON
        return header in _FOR_TRITON or self._metadata.should_pass(header.decode("latin-1"))

    def route(self, fields: Mapping[bytes, bytes]) -> tuple[bool, str | None]:
        """Return whether a call with these headers may go direct, and the metadata's model id."""
        is_plain = (
            self._is_direct
            and fields[b":path"] == _PATH
            and fields[b":method"] == b"POST"
            and fields.get(b"content-type", b"").startswith(b"application/grpc")
            and fields.get(b"te") == b"trailers"
        )
        try:
            return is_plain, _mesh_id(fields)
        except ValueError:
            return False, None

    def max_bytes(self, path: bytes) -> int | None:
        """Return the limit of a method's message; None for a stream, and for unknown methods."""
        limits = self.calls.limits
        if path == _LOAD_PATH:
            return limits.stream
        return limits.unary if path in _UNARY else None

    def word_error(self, error: RelayError) -> Status:
        """Return the status to answer an error with. It is not counted: the fallback server counts
        the call, or nobody does.
        """
        ours = _ERRORS[error.reason](str(error))
        code, text = grpc_status(ours, is_of_mesh=False)
        return int(code.value[0]), text, _list_trailers(ours)

    def report_refusal(
        self, path: bytes, error: Exception, mesh_id: str | None, headers: Headers
    ) -> Status:
        """Log and count a call that was not forwarded; return the status to answer it with."""
        error = _convert_relay_error(error)
        method = path.rpartition(b"/")[2].decode("ascii", "backslashreplace")[:100]
        code, text = self.calls.status_of(
            method, error, partial(_read_ids, headers), is_of_mesh=mesh_id is not None
        )
        if path == _PATH:
            self.served.count(code.name, 0.0)
        return int(code.value[0]), text, _list_trailers(error)

    def admit(
        self, name: bytes, mesh_id: str | None, message: bytes
    ) -> "_DirectCall | AdapterError | None":
        """Lease the model for a call to Triton. Return the error of a call that can only fail, and
        None for one that the fallback server answers.
        """
        try:
            text = name.decode()
            lease = self._models.lease(ModelId(text if mesh_id is None else mesh_id))
        except UnicodeDecodeError:  # the fallback server answers with the error
            return None
        except AdapterError as error:
            return self._refusal(text, mesh_id, error)
        # the fallback server words the loss of a model that its callers have loaded again
        do_callers_reload = mesh_id is not None or self._loads_on_demand
        if do_callers_reload and self.triton.has_lost(lease.record):
            return None
        # Triton gets the message as it is, and so must know the model by the name in it
        is_renamed = lease.record.name != text
        is_named_otherwise = mesh_id is not None and mesh_id != text
        if is_renamed or is_named_otherwise:
            return None
        try:
            check_parameters(message, lease.record, shares_memory=self.shares_memory)
        except AdapterError as error:
            return error
        return _DirectCall(self, lease, mesh_id)

    def _refusal(self, name: str, mesh_id: str | None, error: AdapterError) -> AdapterError | None:
        """Return the error to answer a call whose model cannot be leased. Return None if the
        fallback server is to decide: the model may be loaded for the call, is being loaded, or
        Triton's process may have ended, of which a mesh is told.
        """
        if self._loads_on_demand:
            return None
        try:
            model_id = parse_model_id(name if mesh_id is None else mesh_id)
            if mesh_id is not None:
                self.triton.refuse_lost(model_id)
                if type(error) is BackendUnavailable:  # as TritonState.was_caused_by_exit has it
                    return None
        except AdapterError as earlier:
            return earlier
        return None if self._models.is_being_loaded(model_id) else error

    def is_of_mesh(self, mesh_id: str | None) -> bool:
        """Return whether a mesh, which loads the models itself, has sent the call."""
        return mesh_id is not None and not self._loads_on_demand

    async def wait_until_ready(self, name: bytes, mesh_id: str | None) -> Exception | None:
        """Wait until the model takes inferences, for which it may be loaded. Return None, or the
        error that keeps it from them, which may be a bug.
        """
        try:
            model_id = parse_name(name, "the message")
            if self.is_of_mesh(mesh_id):
                self.triton.refuse_lost(model_id)
            await self._wait_for_lease(model_id, self._load_wait_seconds)
        except Exception as error:  # noqa: BLE001 - `report_refusal` logs a bug, and words the answer
            return error
        return None


def _convert_relay_error(error: Exception) -> Exception:
    """Return the adapter's error for an error of the relay; another error as it is."""
    return _ERRORS[error.reason](str(error)) if isinstance(error, RelayError) else error


def _list_trailers(error: Exception) -> Headers:
    """Return the trailing metadata of a call that fails with `error`: the encodings that are
    understood, or the mark of a call that was not started.
    """
    if isinstance(error, UnknownEncoding):
        return _ACCEPTED
    return tuple((key.encode(), value.encode()) for key, value in trailers_of(error))


def _read_ids(headers: Headers) -> dict[str, str]:
    """Return the request's ids, as fields of the log."""
    text = {key: value for key, value in headers if not key.endswith(b"-bin")}
    return ids_of_headers(
        {key.decode("latin-1"): value.decode("latin-1") for key, value in text.items()}
    )


def _mesh_id(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the id in the metadata, the binary form first. ValueError when it is malformed."""
    if (binary := headers.get(_MESH_BINARY)) is not None:
        return b64decode(binary + b"=" * (-len(binary) % 4), validate=True).decode()
    text = headers.get(_MESH)
    return None if text is None else text.decode("ascii")


class _DirectCall(CountedRequest):
    """Counts one inference that goes to Triton directly, and holds the lease of its model."""

    __slots__ = ("_lease", "_mesh_id", "_policy")

    def __init__(self, policy: RelayPolicy, lease: Lease, mesh_id: str | None) -> None:
        super().__init__(policy.served)
        self._policy = policy
        self._lease = lease
        self.model_id = lease.record.asked_for
        self._mesh_id = mesh_id
        lease.begin(self._begun)

    @property
    def is_lost(self) -> bool:
        """Whether the model is gone."""
        return self._lease.is_lost()

    @property
    def is_cancellable(self) -> bool:
        """Return whether Triton survives the cancel of the call."""
        return self._policy.takes_cancels()

    def on_unload(self, act: Callable[[], None]) -> None:
        """Run `act` when an unload begins before the call ends."""
        self._lease.on_unload(act)

    def check_fields(self, fields: bytes, *, is_whole: bool) -> None:
        """Raise Malformed for a large message whose parameters are forbidden."""
        shares_memory = self._policy.shares_memory
        try:
            check_parameters(
                fields, self._lease.record, shares_memory=shares_memory, is_whole=is_whole
            )
        except InvalidRequest as error:
            raise Malformed(str(error)) from error

    def answered(self) -> None:
        """End the call as a success: count it, and release the model."""
        now = clock.monotonic()
        self._lease.end(None, now)
        self.count("OK", now=now)

    def note_missing_outputs(self) -> None:
        """Record at the model that Triton's answer has none of its outputs."""
        self._lease.note_missing_outputs()

    def cancelled(self) -> None:
        """Count the call as CANCELLED, because its client has disconnected. The model stays leased
        until `ended`.
        """
        self.count("CANCELLED")

    def abandoned(self) -> None:
        """Mark the lease as abandoned: nobody waits for the response, on which Triton works until
        `ended`.
        """
        self._lease.abandon()

    def ended(self, error: Exception | None = None) -> None:
        """Release the model of a call whose client was answered before, or has disconnected: Triton
        has finished it, or broken it off with `error`.
        """
        self._lease.end(None if error is None else _convert_relay_error(error))

    def make_error(self, status: int, text: str) -> AdapterError:
        """Return the error that Triton's status means."""
        code = _CODES.get(status, grpc.StatusCode.UNKNOWN)
        record = self._lease.record
        return self._policy.faults.explain_grpc_inference(
            code.name, text, name=record.name, model_id=record.asked_for, is_tritons=True
        )

    async def failed(self, error: Exception, *, is_over: bool) -> Status:
        """Count and log the call as a failure, and return the status to answer it with. Release the
        model if Triton has finished the call. A bug here is answered INTERNAL.
        """
        try:
            error = await self._judge(_convert_relay_error(error))
        except Exception as bug:  # noqa: BLE001 - a bug is logged, and its caller answered
            error = bug
        if is_over:
            replaced = self._lease.end(error)
            error = replaced if isinstance(replaced, AdapterError) else error
        is_of_mesh = self._mesh_id is not None
        code, text = self._policy.calls.status_of(_METHOD, error, is_of_mesh=is_of_mesh)
        self.count(code.name)
        return int(code.value[0]), text, _list_trailers(error)

    async def _judge(self, error: Exception) -> Exception:
        """Return the error to answer for a failed call: a mesh learns whether Triton's process has
        ended, with its models; for others the lease judges the error.
        """
        if isinstance(error, AdapterError):
            error.model_id = error.model_id or self._lease.record.asked_for
        if not isinstance(error, BackendError | CapacityError):
            return error
        policy = self._policy
        if policy.is_of_mesh(self._mesh_id) and isinstance(error, BackendUnavailable):
            if await policy.triton.was_caused_by_exit(error):
                return policy.triton.explain_lost(self._lease.record.id)
            return error
        judged = await self._lease.judge(error)
        if judged is not error:
            judged.__cause__ = error
        return judged
