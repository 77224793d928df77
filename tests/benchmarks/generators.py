"""The load generators, `wrk` and `h2load` of Debian, and what is read of their output."""

import math
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.benchmarks.place import FailedError, find_program
from tests.grpc_calls import SERVICE, infer_request

_INFER = f"/{SERVICE}/ModelInfer"
_STREAMS = 8
# of what `h2load` sends at a fixed rate: more than wait at once unless a server stands still
_STREAMS_AT_A_RATE = 100
_CALL_SECONDS = 60
_PREFIX_BYTES = 5  # before each message of gRPC
# as tritonclient 2.73 sends them
_METADATA = (
    "content-type: application/grpc",
    "te: trailers",
    "grpc-accept-encoding: identity, deflate, gzip",
    "user-agent: grpc-python/1.85.1 grpc-c/58.0.0 (linux; chttp2)",
)


def run_wrk(script: Path, url: str, seconds: float, core: int) -> int:
    """Send the requests of a script on 8 connections; return how many were answered.

    Raise FailedError if one was not answered with 2xx.
    """
    wrk = find_program("wrk", "wrk")
    command = (wrk, "-t1", "-c8", f"-d{math.ceil(seconds)}", f"-s{script}", url)
    output = _run(("taskset", "-c", str(core), *command))
    if "Non-2xx" in output or "Socket errors" in output:
        raise FailedError(output)
    return int(output.partition(" requests in ")[0].split()[-1])


@dataclass(frozen=True, slots=True)
class GrpcLoad:
    """Holds the figures of one run of `h2load`."""

    answered: int
    seconds: float
    latencies_seconds: Sequence[float]


def run_h2load(address: str, seconds: float, calls_per_second: int | None = None) -> GrpcLoad:
    """Call ModelInfer of the model `identity` on one connection, with one float as its tensor.

    Without a rate eight calls are always in flight. Raise FailedError if a call failed: one that
    failed has no message, and the bytes of all messages are counted.
    """
    request = infer_request("identity", 0.5).SerializeToString()
    answer = _call_once(address, request)
    count = 0
    pace = [f"--max-concurrent-streams={_STREAMS}", f"--duration={round(seconds * 1000)}ms"]
    if calls_per_second is not None:
        count = round(seconds * calls_per_second)
        pace = [
            f"--max-concurrent-streams={_STREAMS_AT_A_RATE}",
            f"--requests={count}",
            f"--rps={calls_per_second}",
        ]
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder, "body")
        body.write_bytes(b"\0" + struct.pack(">I", len(request)) + request)
        log = Path(folder, "log")
        output = _run(
            (
                find_program("h2load", "nghttp2-client"),
                "--clients=1",
                *pace,
                f"--data={body}",
                f"--log-file={log}",
                *(f"--header={line}" for line in _METADATA),
                f"http://{address}{_INFER}",
            )
        )
        rows = [line.split("\t") for line in log.read_text().splitlines()]
    answered = _read_number(r"(\d+) succeeded", output)
    failed = _read_number(r"(\d+) failed", output)
    lost = count - answered if count else 0
    message_bytes = _read_number(r"\((\d+)\) data", output)
    # without a count, the calls in flight at both ends of the time are counted in part
    expected = answered - (0 if count else _STREAMS)
    if failed or lost or message_bytes < expected * (len(answer) + _PREFIX_BYTES):
        raise FailedError(f"{address}: not each call has the right answer\n{output}")
    return GrpcLoad(
        answered=answered,
        seconds=answered / float(_read_text(r"([\d.]+) req/s", output)),
        latencies_seconds=[int(micros) / 1e6 for _, _, micros, *_ in rows],
    )


def _call_once(address: str, request: bytes) -> bytes:
    """Return the message that a server sends back. Raise FailedError if the call fails."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer: bytes = channel.unary_unary(_INFER)(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise FailedError(f"{address}: {error}") from error
    return answer


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _read_text(pattern: str, output: str) -> str:
    match = re.search(pattern, output)
    if match is None:
        raise FailedError(f"no {pattern!r} in\n{output}")
    return match[1]


def _read_number(pattern: str, output: str) -> int:
    return int(_read_text(pattern, output))
