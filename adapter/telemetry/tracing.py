"""Creates spans for an OpenTelemetry collector, if the standard OTEL_ variables name one.

OpenTelemetry is the extra `tracing`, imported only then. Names follow its semantic conventions.
Without a collector there are no spans; a caller's trace context is passed on all the same.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adapter.errors import InvalidSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

# Attribute for the model of a span; the conventions have no name for it.
MODEL = "adapter.model"
CONTEXT_HEADERS = ("traceparent", "tracestate")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# The flush is the end of a stop, before the SIGKILL of a platform.
_FLUSH_SECONDS = 3.0


class Tracing:
    """Opens spans of requests and of calls to Triton, and passes their context on."""

    def __init__(self, provider: "TracerProvider") -> None:
        """Use the tracer of a provider. Raises ImportError without OpenTelemetry."""
        from opentelemetry import trace  # noqa: PLC0415 - see the top
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415 - see the top

        self._provider = provider
        self._tracer = provider.get_tracer("adapter")
        self._context = tracecontext.TraceContextTextMapPropagator()
        self._current = trace.get_current_span
        self._kinds = trace.SpanKind
        self._error = trace.StatusCode.ERROR

    @contextmanager
    def server(self, name: str, headers: Mapping[str, str]) -> Iterator["Span"]:
        """Open the span of a request to the adapter, below the span of its caller's headers.

        The names of the headers are in lower case, or are compared without case. An exception does
        not mark the span as failed, as many are the caller's fault: see `failed`.
        """
        caller = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
        with self._tracer.start_as_current_span(
            name,
            self._context.extract(caller),
            self._kinds.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span

    def trace_id(self) -> str | None:
        """Return the trace of the current span; None if it is not recorded."""
        context = self._current().get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else None

    def failed(self, span: "Span", kind: str) -> None:
        """Mark the span as failed, for an error that is not the caller's fault."""
        span.set_attribute("error.type", kind)
        span.set_status(self._error)

    @contextmanager
    def client(
        self, name: str, attributes: Mapping[str, str], model_id: str | None
    ) -> Iterator["Span"]:
        """Open the span of a call to Triton, and set the model of the request's span."""
        about_model = {} if model_id is None else {MODEL: model_id}
        self._current().set_attributes(about_model)
        with self._tracer.start_as_current_span(
            name,
            kind=self._kinds.CLIENT,
            attributes={**attributes, **about_model},
        ) as span:
            yield span

    def passed_on(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return `headers` with the trace context of the current span in place of theirs."""
        passed = {
            name: value for name, value in headers.items() if name.lower() not in CONTEXT_HEADERS
        }
        self._context.inject(passed)
        return passed

    def close(self) -> None:
        """Flush the last spans, for a limited time if the collector does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSH_SECONDS)


def tracing_of(environ: Mapping[str, str], version: str) -> Tracing | None:
    """Build tracing by the OTEL_ variables; return None if they name no collector.

    Raises InvalidSettings for an exporter or protocol that is not supported.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if is_off or not any(environ.get(name) for name in _ENDPOINTS):
        return None
    if exporter != "otlp":
        raise InvalidSettings([f"OTEL_TRACES_EXPORTER: {exporter!r}: otlp and none are known"])
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise InvalidSettings([f"{_PROTOCOLS[1]}: {protocol!r}: only http/protobuf is spoken here"])
    try:
        return Tracing(_provider(version))
    except ImportError as error:
        reason = "tracing needs the extra `tracing`: in a clone, pip install '.[tracing]'"
        raise InvalidSettings([f"{_ENDPOINTS[1]}: {reason}"]) from error


def _provider(version: str) -> "TracerProvider":
    """Create the provider; the SDK reads sampling, limits and headers from the environment."""
    from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415 - see the top
    from opentelemetry.sdk import resources, trace  # noqa: PLC0415 - see the top
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - see the top

    resource = resources.Resource.create({resources.SERVICE_VERSION: version})
    if str(resource.attributes[resources.SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(resources.Resource({resources.SERVICE_NAME: "triton-adapter"}))
    provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(trace_exporter.OTLPSpanExporter()))
    return provider
