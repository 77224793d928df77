"""Plain calls of InvokeEndpoint whose models are loaded, by callbacks alone.

What cannot be answered here at once, with the body in hand, goes to aiohttp.
"""

from adapter.control.lease import Lease
from adapter.core.artifacts import CacheUse
from adapter.core.calls import RawHeaders
from adapter.errors import AdapterError, CapacityError
from adapter.frontends.http import binary
from adapter.frontends.http.application import ClientConnection, error_boundary
from adapter.frontends.http.endpoint.endpoint import Residency
from adapter.frontends.http.endpoint.errors import (
    CallInfo,
    failure,
    new_request_id,
    new_request_id_line,
    refusal_of,
)
from adapter.frontends.http.endpoint.members import PlainCall
from adapter.frontends.http.fast_path import GATHERED_BYTES, FastPath, Inference, Stage
from adapter.frontends.http.head import Head
from adapter.frontends.http.instrumentation import Refusal

_HEADER_LENGTH = b"inference-header-content-length"


class EndpointInference(Inference):
    """An Inference that takes calls of the endpoint, too. `_body` is kept for a second try, until
    the request is over.
    `_use`: as in CallInfo. `_was_sent`: this is the second try.
    """

    def __init__(self, client: ClientConnection, path: FastPath, residency: Residency) -> None:
        super().__init__(client, path)
        self._residency = residency
        self._body: bytes | None = None
        self._answer: list[bytes] | None = None
        self._size: int | None = None

        self._use, self._was_sent = CacheUse.MISS, False

    def begin(self, head: Head, raw: bytes, body: bytes) -> bool:
        self._use, self._was_sent = CacheUse.MISS, False
        return super().begin(head, raw, body)

    # -- to Triton --------------------------------------------------------------------------

    def _begin_body(self, body: bytes, length: int) -> bool:
        if self._plain.call is None:
            return super()._begin_body(body, length)
        if length > GATHERED_BYTES:
            return False
        self._gather(body)
        return True

    def _serve(self, body: bytes) -> bool:
        self._body, self._answer = None if self._was_sent else body, None
        return super()._serve(body)

    def _find_lease(self) -> Lease | None:
        call = self._plain.call
        if call is None:
            return super()._find_lease()
        lease = self._residency.resident(call.model_id, call.key)
        if lease is None:
            self._residency.refuse(call.model_id, call.key)
            return None
        self._use = CacheUse.HIT
        is_other = lease.record.name != call.name
        return None if is_other or (self._plain.is_typed and lease.record.content_types) else lease

    # -- Receiver ---------------------------------------------------------------------------

    def answered_whole(self, body: bytes) -> None:
        call = self._plain.call
        if call is not None and call.is_renamed:
            self._answered_renamed(call, body)
        else:
            super().answered_whole(body)

    @error_boundary
    def _answered_renamed(self, call: PlainCall, body: bytes) -> None:
        super().answered_whole(self._named(call, body))

    @error_boundary
    def answered(self) -> None:
        call = self._plain.call
        if call is not None and call.is_renamed:
            self._answer = []
        else:
            super().answered()

    @error_boundary
    def received(self, piece: bytes) -> None:
        if self._answer is None:
            super().received(piece)
        else:
            self._answer.append(piece)

    @error_boundary
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
            return body.replace(call.given, call.call_info, 1)
        named, self._size = binary.put_name_back(body, size, call.name, call.model_id)
        self._plain.answered = None  # its head says how long the JSON is
        return named

    def _begin_answer(self, length: int | None, more: bytes = b"") -> bytes:
        if self._plain.call is None:
            return super()._begin_answer(length, more)
        head = super()._begin_answer(length, more + new_request_id_line())
        if self._was_sent:
            self._waited = None  # the times of a second try say nothing of ours
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
                and await self._residency.evict_for(said)
            ):
                self._again(body)
            else:
                self._refuse(said)
        except Exception as bug:  # noqa: BLE001 - all of them
            self.bug(bug)

    def _again(self, body: bytes) -> None:
        """The last time: nothing is kept for another one."""
        self._stage, self._task, self._was_sent = Stage.GATHERING, None, True
        if not self._serve(body):
            self._over()
            self._client.serve_by_application(self._raw + body)

    def _over(self) -> None:
        self._body = self._answer = None
        super()._over()

    def _refusal(self, error: AdapterError) -> Refusal:
        if self._plain.call is None:
            return super()._refusal(error)
        call_info = self._call_info(self._plain.call)
        return _with_headers(refusal_of(error, call_info), call_info)

    def _failure(self) -> Refusal:
        if self._plain.call is None:
            return super()._failure()
        call_info = self._call_info(self._plain.call)
        return _with_headers(failure(call_info), call_info)

    def _call_info(self, call: PlainCall) -> CallInfo:
        return CallInfo(
            new_request_id(),
            call.members.endpoint,
            call.members.variant,
            cache=self._use,
            was_sent=self._was_sent,
            model_id=call.model_id,
            authorization=self._authorization,
        )

    def _authorization(self) -> str:
        return self._request()[2].get("Authorization", "")


def _with_headers(refusal: Refusal, call_info: CallInfo) -> Refusal:
    refusal.headers = {**refusal.headers, **call_info.headers()}
    return refusal


def _json_bytes(headers: RawHeaders) -> int | None:
    for name, value in headers:
        if name.lower() == _HEADER_LENGTH:
            return int(value)
    return None
