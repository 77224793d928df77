"""Heads that real clients write before an inference are planned: it is served by hand."""

from pathlib import Path

import pytest

from tests.frontends.http.listener import Caller, Listener

HEADS = Path(__file__).with_name("heads")
TIMES = 100
FILLED = {"{model}": "m", "{hex64}": "a" * 64, "{hex32}": "b" * 32, "{hex16}": "c" * 16}
FILLED |= {"{hex12}": "d" * 12, "{hex8}": "e" * 8, "{hex4}": "f" * 4}
# what stands before the model itself, and is not what the model's container is asked for
PATHS = {"/endpoints/e/invocations": "/models/m/invoke"}


def clients() -> list[str]:
    return sorted(path.stem for path in HEADS.glob("*.http"))


def request_of(client: str) -> bytes:
    """As recorded, with a body of the length that its head says."""
    _, *lines = (HEADS / f"{client}.http").read_text().splitlines()
    head = "\r\n".join([*lines, "\r\n"])
    for name, value in (FILLED | PATHS).items():
        head = head.replace(name, value)
    assert "{" not in head
    length = next(int(line.split(": ")[1]) for line in lines if line.startswith("Content-Length"))
    return head.encode() + b'{"x":"' + b"y" * (length - 8) + b'"}'


def test_there_are_recorded_heads() -> None:
    assert {"boto3", "curl", "requests", "tritonclient-http"} <= set(clients())


@pytest.mark.parametrize("client", clients())
async def test_each_request_of_this_client_is_planned(
    listener: Listener, caller: Caller, client: str
) -> None:
    for _ in range(TIMES):
        assert (await caller.ask(request_of(client))).status == 200
    assert listener.handled == []
    assert len(listener.server.heads.known) == 1, "its head is read once"
