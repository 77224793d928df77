"""Large bodies at a real Envoy: which are sent again, and what their callers are told."""

import json
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any

import grpc
import pytest

from tests.fleet.envoy import RunningEnvoy
from tests.fleet.stubs import INFER, NO_LIMITS, PatientEnvoy, stub_fleet
from tests.running import wait_until

MIB = 2**20
PIECE = bytes(2**16)
ENDPOINT, HEADER = "/endpoints/any/invocations", "X-Amzn-SageMaker-Target-Model"
HELD = 8 * MIB  # of a body, so that it can be sent again


def rpc(envoy: RunningEnvoy, pieces: Iterable[bytes]) -> tuple[str, str, int]:
    """Call with these messages; return the code, its text and the attempts."""
    own = [*NO_LIMITS, ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(envoy.address, own) as channel:
        call = channel.stream_unary(INFER)
        done: Any
        try:
            _, done = call.with_call(iter(pieces), metadata=[("mm-model-id", "m")], timeout=60)
        except grpc.RpcError as error:
            done = error
    found = dict([*(done.initial_metadata() or ()), *(done.trailing_metadata() or ())])
    return done.code().name, done.details(), int(found.get("x-envoy-attempt-count", 0))


def http(envoy: RunningEnvoy, pieces: Iterable[bytes], size: int) -> tuple[str, str, int]:
    """Send such a body, and read the answer meanwhile; return the status, the text of an error and
    the attempts.
    """
    host, _, port = envoy.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as own,
        ThreadPoolExecutor(1) as sending,
    ):
        head = f"POST {ENDPOINT} HTTP/1.1\r\nHost: any\r\n{HEADER}: m\r\nContent-Length: {size}"
        own.sendall(head.encode() + b"\r\n\r\n")
        sending.submit(send, own, pieces)
        answer = HTTPResponse(own)
        answer.begin()
        body = answer.read().decode()
        own.shutdown(socket.SHUT_RDWR)
    text = json.loads(body)["error"] if body.startswith("{") else body
    return str(answer.status), text, int(answer.headers["x-envoy-attempt-count"])


def send(own: socket.socket, pieces: Iterable[bytes]) -> None:
    """Until all is sent, or Envoy reads no more."""
    with suppress(OSError):
        for piece in pieces:
            own.sendall(piece)


def ask(envoy: RunningEnvoy, way: str, pieces: Iterable[bytes], size: int) -> tuple[str, str, int]:
    return rpc(envoy, pieces) if way == "gRPC" else http(envoy, pieces, size)


def pieces_of(size: int) -> list[bytes]:
    return [PIECE] * (size // len(PIECE))


@pytest.fixture
def refusing(tmp_path):
    """An Envoy, and machines of which the first that is asked refuses when all has come."""
    count = [0]

    def act(call: Any) -> None:
        count[0] += 1
        is_first = count[0] == 1
        call.read()
        call.refuse() if is_first else call.answer(200)

    with stub_fleet(tmp_path, 2, act) as (machines, envoy):
        yield machines, envoy


@pytest.mark.parametrize("way", ["HTTP", "gRPC"])
@pytest.mark.parametrize(("size", "attempts"), [(HELD - MIB // 2, 2), (HELD + MIB, 1)])
def test_body_of_8_mib_goes_to_another_machine(refusing, way, size, attempts):
    """Its own one has no room."""
    machines, envoy = refusing
    code, _, made = ask(envoy, way, pieces_of(size), size)
    wanted = {("HTTP", 2): "200", ("gRPC", 2): "OK", ("HTTP", 1): "503"}
    assert (code, made) == (wanted.get((way, attempts), "RESOURCE_EXHAUSTED"), attempts)
    assert sum(len(each.asked) for each in machines) == attempts


@pytest.mark.parametrize("way", ["HTTP", "gRPC"])
def test_body_too_large_to_repeat_is_unavailable(tmp_path, way):
    """Never 507, which says here that models must be unloaded."""
    size = HELD + 4 * MIB

    with stub_fleet(tmp_path, 2, lambda call: call.refuse(retry_in="3"), PatientEnvoy) as made:
        machines, envoy = made

        def pieces() -> Iterator[bytes]:
            yield PIECE
            wait_until(lambda: is_due_again(envoy), 10, "Envoy waits before it sends it again")
            yield from pieces_of(size)[1:]

        code, text, _ = ask(envoy, way, pieces(), size)
        assert sum(len(each.asked) for each in machines) == 1
    assert code == ("UNAVAILABLE" if way == "gRPC" else "503")
    assert "too large to be sent to another machine" in text


def is_due_again(envoy: RunningEnvoy) -> bool:
    """Whether a machine has refused the only call, and no other one has it yet."""
    found = envoy.stats("^cluster.(http|grpc).upstream_rq_(total|active)$")
    active = sum(value for name, value in found.items() if name.endswith("active"))
    return (found.total(), active) == (1, 0)


def test_a_507_of_a_machine_passes(tmp_path):
    with stub_fleet(tmp_path, 1, lambda call: call.answer(507)) as (_, envoy):
        assert http(envoy, [PIECE], len(PIECE))[0] == "507"


def test_answer_before_the_body_reaches_reading_caller(
    tmp_path,
):
    with stub_fleet(tmp_path, 1, lambda call: call.answer(400)) as (_, envoy):
        for _ in range(8):
            assert http(envoy, pieces_of(20 * MIB), 20 * MIB)[0] == "400"
