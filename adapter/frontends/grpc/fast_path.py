"""Which calls over gRPC go straight to Triton, and what is told of their errors.

ModelInfer does, when Triton knows the model by the caller's own name for it and it is ready. All
else is served by a server of ours, behind a socket.
"""

import logging
import time
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
from adapter.frontends.grpc.middleware import GrpcMiddleware
from adapter.frontends.grpc.v2 import SERVICE
from adapter.frontends.status import grpc_status
from adapter.telemetry.metrics import Metrics

FRONTEND, _METHOD = "grpc_data", "ModelInfer"

_V2, _MESH_RUNTIME = f"/{SERVICE}/".encode(), b"/mmesh.ModelRuntime/"
_PATH, _STREAM, _LOAD = (
    _V2 + name for name in (b"ModelInfer", b"ModelStreamInfer", b"RepositoryModelLoad")
)
_MESH, _MESH_BINARY = b"mm-model-id", b"mm-model-id-bin"
_ENDS_HERE = frozenset({b"grpc-timeout", b"content-length"})
_CODES = {code.value[0]: code for code in grpc.StatusCode}

log = logging.getLogger(__name__)
__all__ = ["FRONTEND", "GrpcFastPath"]


class GrpcFastPath:
    """Of one listener. `is_traced`: spans are made of every call, and that takes the other way."""

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
        self.edge = GrpcMiddleware(metrics, frontend)
        self.served = metrics.traffic.served(frontend, _METHOD)
        self._limits = limits
        self._is_traced = is_traced

    def is_forwarded(self, header: bytes) -> bool:
        """A mesh's own metadata end here, and so do what is kept here: a deadline, a length."""
        return not header.startswith(b"mm-") and header not in _ENDS_HERE

    def route(self, found: Mapping[bytes, bytes]) -> tuple[bool, str | None]:
        """May a call with these headers go straight, and for which model by its metadata?"""
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
        """None for a stream, and for what nobody serves."""
        if path == _LOAD:
            return self._limits.stream
        is_unary = path.startswith((_V2, _MESH_RUNTIME)) and path != _STREAM
        return self._limits.unary if is_unary else None

    def refused(self, path: bytes, error: AdapterError) -> tuple[int, str]:
        code, text = grpc_status(error)
        self.edge.note(path.rpartition(b"/")[2].decode("ascii", "backslashreplace")[:100], error)
        if path == _PATH:
            self.served.count(code.name, 0.0)
        return int(code.value[0]), text

    def admit(self, name: bytes, mesh_id: str | None) -> "_Passage | None":
        try:
            text = name.decode()
            lease = self.control.lease(ModelId(text))
        except (UnicodeDecodeError, AdapterError):  # it is told so by the other way
            return None
        if mesh_id is not None and self.control.presence.has_lost_all:
            return None
        if lease.record.name != text or (mesh_id is not None and mesh_id != text):
            return None
        return _Passage(self, lease, is_of_mesh=mesh_id is not None)

    def error_of(self, name: bytes) -> AdapterError | None:
        try:
            self.control.lease(ModelId(name.decode()))
        except UnicodeDecodeError:
            return None
        except AdapterError as error:
            return error
        return None


def _mesh_id(found: Mapping[bytes, bytes]) -> str | None:
    """ValueError when it is none; the binary form wins."""
    if (binary := found.get(_MESH_BINARY)) is not None:
        return b64decode(binary + b"=" * (-len(binary) % 4), validate=True).decode()
    text = found.get(_MESH)
    return None if text is None else text.decode("ascii")


class _Passage:
    __slots__ = ("_begun", "_gate", "_is_of_mesh", "_lease", "_record")

    def __init__(self, gate: GrpcFastPath, lease: Lease, *, is_of_mesh: bool) -> None:
        self._gate = gate
        self._lease = lease
        self._is_of_mesh = is_of_mesh
        self._record = lease.record
        lease.begin()
        gate.served.in_flight.begin()
        self._begun = time.monotonic()

    def on_unload(self, act: Callable[[], None]) -> None:
        self._lease.arrives(act)

    def answered(self) -> None:
        self._lease.end()
        self._count("OK")

    def cancelled(self) -> None:
        self._count("CANCELLED")

    def abandoned(self) -> None:
        self._lease.abandon()

    def ended(self) -> None:
        self._lease.end()

    def fault(self, status: int, text: str) -> AdapterError:
        code = _CODES.get(status, grpc.StatusCode.UNKNOWN).name
        record = self._record
        return self._gate.faults.of_grpc_inference(code, text, name=record.name, model_id=record.id)

    async def failed(self, error: AdapterError, *, is_over: bool) -> tuple[int, str]:
        """A bug on the way is told as one, and lets go of the model too."""
        error.model_id = error.model_id or self._record.id
        try:
            error = await self._judged(error)
            if is_over and isinstance(told := self._lease.end(error), AdapterError):
                error = told
            self._gate.edge.note(_METHOD, error)
            code, text = grpc_status(error)
        except Exception:
            log.exception("request.failed", extra={"method": _METHOD})
            code, text = grpc.StatusCode.INTERNAL, "InternalError: internal error; see the log"
        finally:
            if is_over:
                self._lease.end(error)
        self._count(code.name)
        return int(code.value[0]), text

    async def _judged(self, error: AdapterError) -> AdapterError:
        if not isinstance(error, BackendError | CapacityError):
            return error
        if self._is_of_mesh and isinstance(error, BackendUnavailable):
            is_lost = await self._gate.control.presence.is_cause_of(error)
            return lost(self._record.id) if is_lost else error
        judged = await self._gate.control.judged(error, self._record.id)
        if judged is not error:
            judged.__cause__ = error
        return judged

    def _count(self, code: str) -> None:
        served = self._gate.served
        served.in_flight.end()
        served.count(code, time.monotonic() - self._begun)
