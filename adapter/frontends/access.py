"""Which calls a listener answers: all or inference alone, and which of them want the token."""

import hmac
from collections.abc import Sequence

from adapter.errors import Forbidden, InferenceOnly, Unauthenticated

# Operations as the metrics name them. What is in none of these sets is refused where only inference
# is served, and wants the token: so a new call is closed until somebody opens it.
_INFERENCE = frozenset(
    {
        *("invoke", "invocations", "infer", "generate", "generate_stream"),
        *("about", "ping", "live", "server_ready", "ready"),
        *("server_metadata", "metadata", "config", "statistics", "all_statistics", "openapi"),
    }
)
# What changes no model besides: lists, and what `passthrough` opens.
_WITHOUT_TOKEN = _INFERENCE | {
    *("list", "get", "repository_index", "shared_memory", "trace", "logging"),
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig"),
    *("ModelStatistics", "ModelInfer", "ModelStreamInfer", "RepositoryIndex"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
    *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    *("TraceSetting", "LogSettings"),
}
# What says nothing of any model: open where all else is for signed calls.
_ABOUT_THE_SERVER = frozenset(
    {
        *("about", "ping", "live", "server_ready", "server_metadata", "openapi"),
        *("ServerLive", "ServerReady", "ServerMetadata"),
    }
)
_SCHEME = "bearer"


class Access:
    """What callers of the listener `name` may do. `infers_only`: inference, and reading what
    health and metadata tell; no loads, unloads, repository, shared memory, trace and log settings.
    `token`: what calls that load, unload and drain must bring, None for nothing. `is_keyed`: the
    endpoint has keys, so that nobody may go round it who has not the token.
    """

    def __init__(
        self,
        name: str,
        *,
        infers_only: bool = False,
        token: str | None = None,
        is_keyed: bool = False,
    ) -> None:
        self.name = name
        self.infers_only = infers_only
        self.is_keyed = is_keyed
        self._token = None if token is None else token.encode()

    def check(self, operation: str, authorization: Sequence[str]) -> None:
        """Raise InferenceOnly, Unauthenticated or Forbidden, whatever model the call names.
        `authorization`: the headers of that name.
        """
        if self.infers_only and operation not in _INFERENCE:
            raise InferenceOnly(
                f"this listener, {self.name}, serves inference alone; loads, unloads and lists "
                "of models are at the listener http"
            )
        if self._token is not None and operation not in _WITHOUT_TOKEN:
            _check_token(self._token, authorization)
        elif self.is_keyed and operation not in _ABOUT_THE_SERVER:
            self._check_keyed(authorization)

    def _check_keyed(self, authorization: Sequence[str]) -> None:
        try:
            if self._token is not None:
                _check_token(self._token, authorization)
                return
        except Unauthenticated as error:
            raise Forbidden(f"models are for signed calls of the endpoint; else {error}") from error
        raise Forbidden("models are for signed calls of the endpoint: it has endpoint_keys")


def _check_token(token: bytes, authorization: Sequence[str]) -> None:
    scheme, _, given = authorization[0].partition(" ") if authorization else ("", "", "")
    if scheme.lower() != _SCHEME:
        raise Unauthenticated("this call wants `Authorization: Bearer TOKEN`", is_wrong=False)
    # in constant time: what is answered when says nothing of how much of it was right
    is_same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token)
    if not is_same or len(authorization) > 1:
        raise Unauthenticated("the token of this call is not that of the adapter", is_wrong=True)
