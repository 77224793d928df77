"""The plan of a run: targets, protocols, limits. `command` checks the values."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from adapter.tools.bench.payload import Payload, Shape

Headers = tuple[tuple[str, str], ...]

_HEX = re.compile(r"\{hex([1-9][0-9]?)\}")


class Protocol(Enum):
    SAGEMAKER_JSON = "sagemaker-json"
    SAGEMAKER_BINARY = "sagemaker-binary"
    V2_JSON = "v2-json"
    V2_BINARY = "v2-binary"
    ENDPOINT_JSON = "endpoint-json"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address or a Unix socket. `authority` is the value of Host and :authority."""

    authority: str
    host: str = ""
    port: int = 0
    socket: str = ""

    @property
    def url(self) -> str:
        return f"unix:{self.socket}" if self.socket else f"http://{self.authority}"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `churn_at` is the HTTP address where models are loaded and unloaded meanwhile."""

    url: str
    address: Address
    protocol: Protocol
    churn_at: Address | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """A closed loop without `rate`; with it, that many arrivals a second on a schedule."""

    connections: int
    streams: int
    rate: float | None
    poisson: bool
    seconds: float | None
    count: int | None
    warmup_seconds: float
    timeout_seconds: float
    interval_seconds: float


@dataclass(frozen=True, slots=True)
class Churn:
    package: str
    every_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`models` is empty when the target's own list is to be used. Most popular first. `heads` are
    the headers of recorded requests, which requests take in turn; empty: the load tester's own.
    """

    targets: tuple[Target, ...]
    slices: int
    models: tuple[str, ...]
    zipf: float
    metadata: tuple[Address, Protocol] | None
    headers: Headers
    heads: tuple[Headers, ...]
    shape: Shape
    payload: Payload | None
    pace: Pace
    churn: Churn | None
    pids: tuple[int, ...]


def parse_url(url: str) -> tuple[Address, Protocol]:
    """Return the address and its default protocol. ValueError says what is right."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return Address("localhost", socket=parts.path), Protocol.SAGEMAKER_JSON
    is_whole = parts.hostname and parts.port and parts.path in {"", "/"} and not parts.query
    if parts.scheme not in {"http", "grpc"} or not is_whole:
        raise ValueError("write http://HOST:PORT, grpc://HOST:PORT or unix:/SOCKET")
    protocol = Protocol.GRPC if parts.scheme == "grpc" else Protocol.SAGEMAKER_JSON
    return Address(parts.netloc, parts.hostname or "", parts.port or 0), protocol


def headers_for(headers: Sequence[tuple[str, str]], model: str) -> Headers:
    """Put the request's model in place of `{model}` in values."""
    return tuple((name, value.replace("{model}", model)) for name, value in headers)


def differs(text: str) -> bool:
    """Return whether `fresh` returns another text each time."""
    return _HEX.search(text) is not None


def fresh(text: str) -> str:
    """Replace `{hexN}` by N random hexadecimal digits."""
    return _HEX.sub(_digits, text)


def _digits(found: re.Match[str]) -> str:
    count = int(found[1])
    return f"{random.getrandbits(4 * count):0{count}x}"


def read_head(text: str) -> Headers:
    """Parse a request head as a client wrote it, its request line first; lines that begin with `#`
    are comments. Raises ValueError.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if not lines or not lines[0].endswith(" HTTP/1.1"):
        raise ValueError("it does not begin with a request line of HTTP/1.1")
    headers = tuple(parse_header(line) for line in lines[1:])
    if any(name.lower() == "transfer-encoding" for name, _ in headers):
        raise ValueError("bodies are sent with a length, not with a Transfer-Encoding")
    return headers


def parse_header(text: str) -> tuple[str, str]:
    """Parse NAME:VALUE in printable ASCII, or raise ValueError."""
    name, colon, value = text.partition(":")
    if not name or not colon or not text.isprintable() or not text.isascii() or " " in name:
        raise ValueError(f"{text!r} is not NAME:VALUE")
    return name, value.strip()
