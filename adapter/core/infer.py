"""One inference as a frontend hands it to a data plane, and what comes back: bytes, no tensors."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from adapter.core.registry import ModelRecord


@dataclass(frozen=True, slots=True)
class InferRequest:
    """`body` is whole when small, else a stream. `content_length` is None for a chunked one.

    `json_header_bytes` is how much of the body is JSON, the rest being raw tensors; None when all
    of it is JSON (the binary tensor extension of V2).
    """

    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]
    content_length: int | None
    json_header_bytes: int | None


class InferAnswer(Protocol):
    """A good answer, not read yet. Read it once, whole or in chunks."""

    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content_length(self) -> int | None: ...
    @property
    def json_header_bytes(self) -> int | None: ...
    async def read(self) -> bytes: ...
    def chunks(self) -> AsyncIterator[bytes]: ...


class DataPlane(Protocol):
    def infer(
        self, record: ModelRecord, request: InferRequest
    ) -> AbstractAsyncContextManager[InferAnswer]:
        """Whatever is no good answer is raised as one of our errors."""
