"""Plain calls of InvokeEndpoint whose models are loaded, by callbacks alone.

What cannot be answered here at once, with the body in hand, goes to aiohttp.
"""

from collections.abc import Sequence
from typing import Any

from adapter.control.lease import Lease
from adapter.core.artifacts import CacheUse
from adapter.core.calls import RawHeaders
from adapter.errors import AdapterError, CapacityError
from adapter.frontends.http import binary
from adapter.frontends.http.callbacks import guarded
from adapter.frontends.http.content_types import explained
from adapter.frontends.http.endpoint.endpoint import Residency
from adapter.frontends.http.endpoint.errors import (
    REQUEST_ID,
    Refusal,
    Told,
    failure,
    new_request_id,
    new_request_id_line,
    refusal_of,
    region_of,
)
from adapter.frontends.http.endpoint.plain import PlainCall
from adapter.frontends.http.fast_path import FastPath, Front, Inference, Stage
from adapter.frontends.http.head import headers_of
from adapter.frontends.http.observer import INTERNAL_ERROR

_HEADER_LENGTH = b"inference-header-content-length"


class EndpointInference(Inference):
    """An Inference that takes calls of the endpoint, too. `_body` is kept for a second try."""

    def __init__(self, front: Front, path: FastPath, residency: Residency) -> None:
        super().__init__(front, path)
        self._residency = residency
        self._body: bytes | None = None
        self._answer: list[bytes] | None = None
        self._size: int | None = None

    # -- to Triton --------------------------------------------------------------------------

    def _gather(self, body: bytes) -> bool:
        if self._plain.call is None:
            return super()._gather(body)
        self._hold(body)
        self._pieces = [body]
        return True

    def _stream(self, body: bytes, length: int) -> bool:
        return self._plain.call is None and super()._stream(body, length)

    def _serve(self, body: bytes) -> bool:
        self._body, self._answer = body, None
        return super()._serve(body)

    def _find_lease(self) -> Lease | None:
        call = self._plain.call
        if call is None:
            return super()._find_lease()
        try:
            lease = self._residency.resident(call.model_id, call.key)
        except AdapterError:
            return None
        if lease is None or lease.record.name != call.name:
            return None
        return None if self._plain.is_typed and lease.record.content_types else lease

    # -- Receiver ---------------------------------------------------------------------------

    def answered_whole(self, body: bytes) -> None:
        call = self._plain.call
        if call is not None and call.is_renamed:
            self._answered_renamed(call, body)
        else:
            super().answered_whole(body)

    @guarded
    def _answered_renamed(self, call: PlainCall, body: bytes) -> None:
        super().answered_whole(self._named(call, body))

    @guarded
    def answered(self) -> None:
        call = self._plain.call
        if call is not None and call.is_renamed:
            self._answer = []
        else:
            super().answered()

    @guarded
    def received(self, piece: bytes) -> None:
        if self._answer is None:
            super().received(piece)
        else:
            self._answer.append(piece)

    @guarded
    def ended(self) -> None:
        if self._answer is None:
            super().ended()
        else:
            self.answered_whole(b"".join(self._answer))

    def _named(self, call: PlainCall, body: bytes) -> bytes:
        """Return the answer under the name that was asked for."""
        assert self._upstream is not None  # noqa: S101 - it tells this
        size = _json_bytes(self._upstream.headers)
        if size is None:
            return body.replace(call.given, call.told, 1)
        named, self._size = binary.put_name_back(body, size, call.name, call.model_id)
        self._plain.answered = None  # its head says how long the JSON is
        return named

    def _begin_answer(self, length: int | None, more: bytes = b"") -> bytes:
        if self._plain.call is None:
            return super()._begin_answer(length, more)
        head = super()._begin_answer(length, more + new_request_id_line())
        if self._body is None:  # it is the second try, whose times say nothing of ours
            self._waited = None
        return head

    def _fields(self, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        call = self._plain.call
        if call is not None and call.is_renamed:
            headers = [
                (name, str(self._size).encode() if name.lower() == _HEADER_LENGTH else value)
                for name, value in headers
            ]
        return super()._fields(headers)

    # -- how it ends ------------------------------------------------------------------------

    async def _judge(self, error: AdapterError) -> None:
        call, body = self._plain.call, self._body
        if call is None:
            await super()._judge(error)
            return
        try:
            said = await self._path.control.judged(error, call.model_id)
            if (
                body is not None
                and isinstance(said, CapacityError)
                and await self._residency.make_room(said)
            ):
                self._again(body)
            else:
                self._task = None
                self._refuse(said)
        except Exception as bug:  # noqa: BLE001 - all of them
            self.bug(bug)

    def _again(self, body: bytes) -> None:
        """The last time: nothing is kept for another one."""
        self._stage, self._task = Stage.GATHERING, None
        is_taken = self._serve(body)
        self._body = None
        if not is_taken:
            self._over()
            self._front.serve_by_application(self._raw + body)

    def _refuse(self, error: AdapterError) -> None:
        call = self._plain.call
        if call is None:
            super()._refuse(error)
            return
        target, headers = headers_of(self._raw)
        error = explained(error, headers, None) if self._plain.is_typed else error
        region = region_of(headers.get("Authorization", ""))
        members = call.members
        told = Told(
            *(new_request_id(), members.endpoint, members.variant, region),
            cache=CacheUse.HIT,
            model_id=call.model_id,
        )
        refusal = refusal_of(error, told)
        self._path.observer.refused(
            error,
            headers,
            ("POST", target),
            self._plain.route.operation,
            call.model_id,
            more={"status": refusal.status, "aws_request_id": told.request_id},
        )
        self._tell(refusal, told.request_id)

    def _say(
        self, status: int, body: dict[str, Any], fields: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        if self._plain.call is not None and body is INTERNAL_ERROR:
            self._tell(failure(), new_request_id())
        else:
            super()._say(status, body, fields)

    def _tell(self, refusal: Refusal, request_id: str) -> None:
        headers = {REQUEST_ID: request_id, **refusal.headers}
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        super()._say(refusal.status, refusal.body, fields)


def _json_bytes(headers: RawHeaders) -> int | None:
    for name, value in headers:
        if name.lower() == _HEADER_LENGTH:
            return int(value)
    return None
