"""An OpenTelemetry collector of a few lines: OTLP over HTTP, kept in memory."""

import json
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

from tests.fakes.loop_thread import loop_in_thread

_KINDS = {2: "server", 3: "client"}


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    is_error: bool
    attributes: dict[str, Any]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._news = threading.Condition()

    async def export(self, request: web.Request) -> web.Response:
        raw = await request.read()
        if request.content_type == "application/json":  # Triton's exporter
            spans = list(_of_json(json.loads(raw)))
        else:
            spans = list(_of_protobuf(pb.ExportTraceServiceRequest.FromString(raw)))
        with self._news:
            self.spans += spans
            self._news.notify_all()
        return web.Response(
            body=pb.ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def of(self, trace_id: str, service: str, kind: str = "", seconds: float = 30) -> list[Span]:
        """Those of one trace, once there is any; none if that takes too long."""

        def found() -> list[Span]:
            mine = [s for s in self.spans if (s.trace_id, s.service) == (trace_id, service)]
            return [span for span in mine if kind in {"", span.kind}]

        with self._news:
            self._news.wait_for(found, seconds)
            return found()

    def root_of(self, trace_ids: Collection[str], seconds: float) -> Span | None:
        """The span that Triton hung into one of the contexts which it was given."""

        def found() -> list[Span]:
            roots = [span for span in self.spans if span.name == "InferRequest"]
            return [span for span in roots if span.trace_id in trace_ids]

        with self._news:
            self._news.wait_for(found, seconds)
            return next(iter(found()), None)


def _of_protobuf(message: Any) -> Iterator[Span]:
    for group in message.resource_spans:
        service = _plain(group.resource.attributes)["service.name"]
        for one in (span for scope in group.scope_spans for span in scope.spans):
            yield Span(
                service,
                one.name,
                _KINDS.get(one.kind, str(one.kind)),
                one.trace_id.hex(),
                one.span_id.hex(),
                one.parent_span_id.hex(),
                one.status.code == one.status.STATUS_CODE_ERROR,
                _plain(one.attributes),
            )


def _of_json(message: Any) -> Iterator[Span]:
    for group in message["resourceSpans"]:
        for one in (span for scope in group["scopeSpans"] for span in scope["spans"]):
            yield Span(
                "triton",
                one["name"],
                str(one["kind"]),
                one["traceId"],
                one["spanId"],
                one.get("parentSpanId", ""),
                is_error=False,
                attributes={},
            )


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """With the endpoint of it, in a thread of its own."""
    found = Collector()

    async def begin() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_post("/v1/traces", found.export)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    with loop_in_thread() as run:
        runner, port = run(begin())
        try:
            yield found, f"http://127.0.0.1:{port}"
        finally:
            run(runner.cleanup())
