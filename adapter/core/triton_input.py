"""The closed tables of what Triton is handed of a caller's request: headers, metadata, parameters.

Some of what Triton 2.51 reads of a request ends it, and with it all models: it parses the weights
of `Accept-Encoding` with a function that throws, and divides by the size of an output's elements.
A header that no table here names ends at the adapter. Those that Triton parses are written anew.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from adapter.errors import InvalidRequest

CLASSIFICATION = "classification"
REGION = "shared_memory_region"

_AS_THEY_CAME = frozenset(
    {
        *("traceparent", "tracestate", "x-amzn-sagemaker-custom-attributes", "x-request-id"),
        "endpoint-load-metrics-format",  # the metrics that Triton adds to its answer, for KServe
    }
)
# about one connection, not the call (RFC 9110 section 7.6.1), or written anew
OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "expect", "content-length"),
    }
)

# The header by which an embedded Triton knows the adapter's restricted calls over HTTP.
HTTP_KEY_HEADER = "triton-adapter-key"

# These are never passed on, whatever pattern matches them: secrets and signatures, headers that the
# adapter writes, and `triton_grpc_error`, with which a failure in a stream may end Triton 2.51.
_NEVER = OF_THE_CONNECTION | {
    *("authorization", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256"),
    *("amz-sdk-invocation-id", "amz-sdk-request", "x-amzn-trace-id"),
    *("accept-encoding", "content-encoding", "content-type", "inference-header-content-length"),
    "triton_grpc_error",
    HTTP_KEY_HEADER,
}
_PACKED = frozenset({"gzip", "deflate"})
_KNOWN = _PACKED | {"identity", "*"}
_WEIGHT = re.compile(r"[ \t]*q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)[ \t]*", re.IGNORECASE)
_LONGEST_ENCODINGS = 1000
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Unclassified:
    """Names the outputs of a model whose `classification` ends Triton 2.51, or may over HTTP."""

    strings: frozenset[str]
    varying: frozenset[str]  # over HTTP, and only if they have no elements

    def list_refused(self, *, has_empty_input: bool) -> frozenset[str]:
        """Return the outputs that a request over HTTP may not classify."""
        return self.strings | self.varying if has_empty_input else self.strings


def make_region_refusal() -> InvalidRequest:
    """Return the refusal of a request that names a region of shared memory."""
    return InvalidRequest(
        f"{REGION} is not taken here; see docs/v2.md#calls-about-the-whole-server"
    )


def make_classification_refusal(what: str) -> InvalidRequest:
    """Return the refusal of a `classification` that may end Triton."""
    return InvalidRequest(
        f"{CLASSIFICATION} of {what} is not possible: it has strings, or may have no elements, as"
        " an input of the request; see docs/v2.md#classification"
    )


class HeaderTable:
    """Decides which headers of a request Triton is handed. One table is for HTTP, one for gRPC."""

    def __init__(
        self,
        flag: str,  # of tritonserver: the pattern of the headers that models are told
        arguments: Sequence[str] | None,  # tritonserver's; None where they are not known
    ) -> None:
        self._matches = (
            _match_any if arguments is None else _compile_pattern(_read_flag(flag, arguments))
        )

    def should_pass(self, name: str) -> bool:
        """Return whether a header, whose name is in lower case, goes to Triton as it came."""
        is_for_models = name not in _NEVER and bool(self._matches(name))
        return is_for_models or name in _AS_THEY_CAME

    def rewrite(self, headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the headers for Triton of a request over HTTP: those that pass as they came, and
        those that Triton parses written anew.

        Raises InvalidRequest if Inference-Header-Content-Length is not a number.
        """
        passed: list[tuple[str, str]] = []
        encodings: list[str] = []
        for name, value in headers:
            key = name.lower()
            if key == "accept-encoding":
                encodings.append(value)
            elif key == "content-encoding":
                coding = value.strip().lower()
                if coding in _PACKED:
                    passed.append(("Content-Encoding", coding))
            elif key == "inference-header-content-length":
                passed.append(("Inference-Header-Content-Length", _read_number(value)))
            elif self.should_pass(key) and (key not in _AS_THEY_CAME or _is_printable(value)):
                passed.append((name, value))
        accepted = choose_encoding(",".join(encodings))
        if accepted is not None:
            passed.append(("Accept-Encoding", accepted))
        return passed


def choose_encoding(value: str) -> str | None:
    """Return the compression that a caller likes best and Triton can make; None for no compression.

    Among codings of one weight the first counts, as for Triton. A weight that is not one of RFC
    9110 rules its coding out.
    """
    best = "identity"
    highest = 0.0
    for part in value[:_LONGEST_ENCODINGS].split(","):
        coding, has_weight, text = part.partition(";")
        coding = coding.strip().lower()
        weight = _read_weight(text) if has_weight else 1.0
        if coding in _KNOWN and weight > highest:
            best = coding
            highest = weight
    return best if best in _PACKED else None


def _is_printable(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _read_weight(text: str) -> float:
    match = _WEIGHT.fullmatch(text)
    return 0.0 if match is None else float(match[1])


def _read_number(value: str) -> str:
    if _NUMBER.fullmatch(value.strip()) is None:
        raise InvalidRequest(f"Inference-Header-Content-Length is not a number: {value[:40]!r}")
    return str(int(value))


def _match_any(_: str) -> object:
    return True


def _read_flag(flag: str, arguments: Sequence[str]) -> str:
    """Return the last value of a flag; "" without it."""
    value = ""
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, has_value, given = argument.partition("=")
        if name == flag:
            value = given if has_value else following
    return value


def _compile_pattern(pattern: str) -> Callable[[str], object]:
    """Return a search that finds at least what Triton's RE2 finds by this pattern, in either case.

    An empty pattern finds nothing.
    """
    if not pattern:
        return lambda _: False
    try:
        return re.compile(pattern.removeprefix("(?-i)"), re.IGNORECASE).search
    except re.error:
        # A pattern that only RE2 can read. Too many headers are harmless: Triton itself passes on
        # to models only those of its pattern.
        return _match_any
