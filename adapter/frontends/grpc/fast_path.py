"""The routing policy of the gRPC proxy: which calls go to Triton directly, and their errors.

ModelInfer does, of a ready model that Triton knows by the client's name. All else goes to the
fallback server, a grpc.aio server of this process behind a Unix socket.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping

import grpc

from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.control.presence import lost
from adapter.core.faults import Faults
from adapter.core.model import ModelId
from adapter.errors import AdapterError, BackendError, BackendUnavailable, CapacityError
from adapter.frontends.grpc.limits import MessageLimits
from adapter.frontends.grpc.middleware import CountedRequest, GrpcMiddleware
from adapter.frontends.grpc.v2 import SERVICE
from adapter.telemetry.metrics import Metrics

FRONTEND, _METHOD = "grpc_data", "ModelInfer"

_V2, _MESH_RUNTIME = f"/{SERVICE}/".encode(), b"/mmesh.ModelRuntime/"
_PATH, _STREAM, _LOAD = (
    _V2 + name for name in (b"ModelInfer", b"ModelStreamInfer", b"RepositoryModelLoad")
)
_MESH, _MESH_BINARY = b"mm-model-id", b"mm-model-id-bin"
_ENDS_HERE = frozenset({b"grpc-timeout", b"content-length"})
_CODES = {code.value[0]: code for code in grpc.StatusCode}

__all__ = ["FRONTEND", "GrpcFastPath"]


class GrpcFastPath:
    """The policy of one listener. `is_traced`: every call gets a span, in the fallback server."""

    def __init__(
        self,
        control: ModelControl,
        faults: Faults,
        metrics: Metrics,
        limits: MessageLimits,
        *,
        frontend: str = FRONTEND,
        is_traced: bool = False,
    ) -> None:
        self.control = control
        self.faults = faults
        self.middleware = GrpcMiddleware(metrics, frontend)
        self.served = self.middleware.served(_METHOD)
        self._limits = limits
        self._is_traced = is_traced

    def is_forwarded(self, header: bytes) -> bool:
        """False for ModelMesh's own metadata, and for the deadline, which is kept here."""
        return not header.startswith(b"mm-") and header not in _ENDS_HERE

    def route(self, found: Mapping[bytes, bytes]) -> tuple[bool, str | None]:
        is_plain = (
            not self._is_traced
            and found[b":path"] == _PATH
            and found[b":method"] == b"POST"
            and found.get(b"content-type", b"").startswith(b"application/grpc")
            and found.get(b"te") == b"trailers"
            and found.get(b"grpc-encoding", b"identity") == b"identity"
        )
        try:
            return is_plain, _mesh_id(found)
        except ValueError:
            return False, None

    def max_bytes(self, path: bytes) -> int | None:
        """None for a stream, and for unknown methods."""
        if path == _LOAD:
            return self._limits.stream
        is_unary = path.startswith((_V2, _MESH_RUNTIME)) and path != _STREAM
        return self._limits.unary if is_unary else None

    def refused(self, path: bytes, error: AdapterError) -> tuple[int, str]:
        method = path.rpartition(b"/")[2].decode("ascii", "backslashreplace")[:100]
        code, text = self.middleware.status_of(method, error)
        if path == _PATH:
            self.served.count(code.name, 0.0)
        return int(code.value[0]), text

    def admit(self, name: bytes, mesh_id: str | None) -> "_DirectCall | None":
        try:
            text = name.decode()
            lease = self.control.lease(ModelId(text))
        except (UnicodeDecodeError, AdapterError):  # the fallback server answers with the error
            return None
        if mesh_id is not None and self.control.presence.has_lost_all:
            return None
        if lease.record.name != text or (mesh_id is not None and mesh_id != text):
            return None
        return _DirectCall(self, lease, is_of_mesh=mesh_id is not None)

    def error_of(self, name: bytes) -> AdapterError | None:
        try:
            self.control.lease(ModelId(name.decode()))
        except UnicodeDecodeError:
            return None
        except AdapterError as error:
            return error
        return None


def _mesh_id(found: Mapping[bytes, bytes]) -> str | None:
    """Return the id in the metadata, the binary form first. ValueError when it is malformed."""
    if (binary := found.get(_MESH_BINARY)) is not None:
        return b64decode(binary + b"=" * (-len(binary) % 4), validate=True).decode()
    text = found.get(_MESH)
    return None if text is None else text.decode("ascii")


class _DirectCall(CountedRequest):
    __slots__ = ("_is_of_mesh", "_lease", "_policy")

    def __init__(self, policy: GrpcFastPath, lease: Lease, *, is_of_mesh: bool) -> None:
        super().__init__(policy.served)
        self._policy = policy
        self._lease = lease
        self._is_of_mesh = is_of_mesh
        lease.begin()

    def on_unload(self, act: Callable[[], None]) -> None:
        self._lease.arrives(act)

    def answered(self) -> None:
        self._lease.end()
        self.count("OK")

    def cancelled(self) -> None:
        self.count("CANCELLED")

    def abandoned(self) -> None:
        self._lease.abandon()

    def ended(self) -> None:
        self._lease.end()

    def fault(self, status: int, text: str) -> AdapterError:
        code, record = _CODES.get(status, grpc.StatusCode.UNKNOWN).name, self._lease.record
        faults = self._policy.faults
        return faults.of_grpc_inference(code, text, name=record.name, model_id=record.id)

    async def failed(self, error: AdapterError, *, is_over: bool) -> tuple[int, str]:
        """A bug on the way is answered INTERNAL, and releases the model too."""
        error.model_id = error.model_id or self._lease.record.id
        middleware = self._policy.middleware
        try:
            error = await self._judged(error)
            if is_over and isinstance(replaced := self._lease.end(error), AdapterError):
                error = replaced
            code, text = middleware.status_of(_METHOD, error)
        except Exception as bug:  # noqa: BLE001 - it is logged, and the client answered
            code, text = middleware.status_of(_METHOD, bug)
        finally:
            if is_over:
                self._lease.end(error)
        self.count(code.name)
        return int(code.value[0]), text

    async def _judged(self, error: AdapterError) -> AdapterError:
        if not isinstance(error, BackendError | CapacityError):
            return error
        control, model_id = self._policy.control, self._lease.record.id
        if self._is_of_mesh and isinstance(error, BackendUnavailable):
            return lost(model_id) if await control.presence.is_cause_of(error) else error
        judged = await control.judged(error, model_id)
        if judged is not error:
            judged.__cause__ = error
        return judged
