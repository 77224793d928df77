"""One HTTP/1.1 connection with one request in flight, on httptools."""

import json
from time import perf_counter
from typing import Any

from bench.connection import ClientProtocol, Failure, Finish
from bench.extra import needed
from bench.requests import Request

_OK = 200
_KEPT_BYTES = 4096  # of the body of an error
_SHOWN = 300


class HttpClientProtocol(ClientProtocol):
    def __init__(self, finish: Finish) -> None:
        super().__init__(finish)
        httptools = needed("httptools")
        self._error: type[Exception] = httptools.HttpParserError
        self._parser: Any = httptools.HttpResponseParser(self)
        self._due: float | None = None  # None while idle
        self._sent = 0.0
        self._body = b""
        self.ready.set_result(None)

    def write(self, request: Request, due: float) -> None:
        self._due = due
        self._sent = perf_counter()
        for part in request.parts:
            self.transport.write(part)

    def data_received(self, data: bytes) -> None:
        if self._due is None:
            self.fail(Failure("protocol", "bytes that nobody asked for"))
            return
        try:
            self._parser.feed_data(data)
        except self._error as error:
            self.fail(Failure("protocol", f"{type(error).__name__}: {error}"))

    # called by the parser

    def on_body(self, body: bytes) -> None:
        if len(self._body) < _KEPT_BYTES and self._parser.get_status_code() != _OK:
            self._body += body[:_KEPT_BYTES]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        due = self._due
        if due is None or status < _OK:  # an interim answer; the real one follows
            return
        self._due = None
        failure = None
        if status != _OK:
            failure, self._body = _failure(status, self._body), b""
        if not self._parser.should_keep_alive():
            self.is_open = False
            self.transport.close()
        self.finish(due, failure)

    def fail(self, failure: Failure) -> None:
        self.is_open = False
        self.transport.abort()
        if self._due is not None:
            due, self._due = self._due, None
            self.finish(due, failure)

    def expire(self, before: float, failure: Failure) -> None:
        if self._due is not None and self._sent < before:
            self.fail(failure)


def _failure(status: int, body: bytes) -> Failure:
    """Add the `code` of the adapter's JSON to the status; Triton's JSON has only `error`."""
    text = body.decode(errors="replace").strip()
    try:
        given = json.loads(text)
        code, text = given.get("code"), str(given.get("error", text))
    except (ValueError, AttributeError):
        code = None
    return Failure(f"{status} {code}" if code else str(status), text[:_SHOWN])
