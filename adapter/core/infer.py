"""A call over HTTP, from a frontend to a data plane, and its answer: bytes, no tensors."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from adapter.core.registry import ModelRecord


class Hold(Protocol):
    """What keeps a model in place while Triton works on a call of it (control/lease.py).

    A data plane whose caller leaves before Triton is done calls `abandon`, and `end` when it is.
    """

    @property
    def record(self) -> ModelRecord | None: ...
    def abandon(self) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class V2Call:
    """A call of Triton's V2 REST, passed on as it is. `path` stands behind /v2, in Triton's names.
    `body` is whole when small, else a stream, whose length is among the `headers` if it is known.

    `is_probe`: any status is an answer. `is_stream`: it may last for ever, so that the time limit
    is one for each piece of the answer.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes] | None = None
    is_probe: bool = False
    is_stream: bool = False


class V2Answer(Protocol):
    """A good answer, not read yet. Read it once, whole or in chunks.

    `json_header_bytes` is how much of the body is JSON, the rest being raw tensors; None when all
    of it is JSON (the binary tensor extension of V2).
    """

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content_length(self) -> int | None: ...
    @property
    def json_header_bytes(self) -> int | None: ...
    async def read(self) -> bytes: ...
    def chunks(self) -> AsyncIterator[bytes]: ...


class V2DataPlane(Protocol):
    def forward(self, call: V2Call, hold: Hold | None) -> AbstractAsyncContextManager[V2Answer]:
        """Whatever is no good answer is raised as one of our errors. `hold` is of the model that
        the call is about, if it is about one; who leaves early leaves it to Triton.
        """
