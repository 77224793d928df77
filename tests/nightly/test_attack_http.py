"""Callers of the HTTP listener who hang up, dawdle and forge, among others who do not.

Callers who cut requests and answers: test_cuts.py.
Triton lives through it; whoever asks as one should is answered, with what is its own; and nothing
is left behind.
"""

import asyncio
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Self

import pytest

from tests.frontends.http.test_forged_answers import LENGTH, Forgery
from tests.frontends.http.test_forged_answers import Wire as TritonWire
from tests.journeys.memory.models import metric
from tests.nightly.test_cuts import resident_bytes
from tests.running import EXAMPLES, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

MODEL, SLOW, OTHER = "identity", "slow", "other"
MOST_SECONDS = 45  # for one answer
GROWTH_BYTES = 96 * 2**20
LARGEST = 300_000  # values of four bytes
KEPT = (5, 60)  # requests on one connection
PATHS = (f"/models/{MODEL}/invoke", f"/v2/models/{MODEL}/infer")


@dataclass
class Books:
    """`valid` counts what those saw who asked as one should; `done` all that was tried."""

    chance: random.Random
    address: str
    end: float
    valid: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    numbers: count = field(default_factory=lambda: count(1))

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self.end or len(self.wrong) > 5

    def values(self) -> bytes:
        """No two are alike, nor is a part of one like another."""
        size = round(LARGEST ** self.chance.random())
        return next(self.numbers).to_bytes(4, "little") * size


def body_of(ident: str, values: bytes) -> tuple[bytes, int]:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values) // 4]}
    tensor["parameters"] = {"binary_data_size": len(values)}
    wanted = {"parameters": {"binary_data_output": True}}
    head = json.dumps({"id": ident, "inputs": [tensor], **wanted}).encode()
    return head + values, len(head)


def framed(books: Books, path: str, body: bytes, size: int) -> bytes:
    """Sized, or in chunks of odd lengths."""
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    is_v2 = path.startswith("/v2")
    lines = [f"POST {path} HTTP/1.1", "Host: localhost"]
    lines.append(f"{LENGTH}: {size}" if is_v2 else f"Content-Type: {kind}{size}")
    if books.chance.random() < 0.6:
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"]).encode() + body
    pieces, at = [], 0
    while at < len(body):
        piece = body[at : at + round(200_000 ** books.chance.random())]
        pieces.append(b"%X;x=y\r\n%b\r\n" % (len(piece), piece))
        at += len(piece)
        if len(pieces) > 50:
            pieces.append(b"%x\r\n%b\r\n" % (len(body) - at, body[at:]) if body[at:] else b"")
            break
    head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "\r\n"]).encode()
    return head + b"".join(pieces) + b"0\r\nX-Trailer: y\r\n\r\n"


class Wire:
    def __init__(self, books: Books) -> None:
        self.books = books

    async def __aenter__(self) -> Self:
        host, port = self.books.address.split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port), limit=2**20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def reset(self) -> None:
        own = self.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
        self.writer.transport.abort()

    async def check(self, ident: str, values: bytes) -> None:
        """One valid request and its answer."""
        path = self.books.chance.choice(PATHS)
        async with asyncio.timeout(MOST_SECONDS):
            self.writer.write(framed(self.books, path, *body_of(ident, values)))
            await self.writer.drain()
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"\r\nContent-Length: ")[2].partition(b"\r\n")[0])
            body = await self.reader.readexactly(length)
        status = head.split()[1].decode()
        self.books.valid[status] += 1
        if status == "200":
            text = body[: -len(values)]
            if not body.endswith(values) or f'"id":"{ident}"'.encode() not in text:
                self.books.wrong.append(f"to {ident}, {len(values)} bytes: {head + body[:300]!r}")
        elif f'"model_name": "{MODEL}"'.encode() not in body:
            self.books.wrong.append(f"to {ident}: {body[:300]!r}")


async def asks_as_one_should(books: Books) -> None:
    async with Wire(books) as wire:
        for _ in range(books.chance.randint(*KEPT)):
            await wire.check(str(next(books.numbers)), books.values())
            if books.is_over:
                return


def forges(forgery: Forgery) -> Callable[[Books], Awaitable[None]]:
    async def act(books: Books) -> None:
        async with Wire(books) as wire:
            await wire.check(forgery.ident, forgery.learned)
            await wire.check(forgery.ident, forgery.tensor)

    return act


async def hangs_up_while_the_model_computes(books: Books) -> None:
    async with Wire(books) as wire:
        path = f"/v2/models/{SLOW}/infer"
        wire.writer.write(framed(books, path, *body_of("slow", b"SLOW")))
        await asyncio.sleep(books.chance.random() * 0.3)
        if books.chance.random() < 0.5:
            wire.reset()
    await asyncio.sleep(0.3)


async def dawdles(books: Books) -> None:
    async with Wire(books) as wire:
        path = books.chance.choice((*PATHS, f"/models/{OTHER}/invoke", "/models"))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
        wire.writer.write(head.encode())
        for _ in range(books.chance.randint(1, 60)):
            wire.writer.write(b"x")
            await asyncio.sleep(0.25)
            if books.is_over or wire.reader.at_eof() or wire.writer.is_closing():
                return


async def loads_and_unloads(books: Books) -> None:
    """Beside all of it; an unload has to wait for nobody's body."""
    body = json.dumps({"model_name": OTHER, "url": str(EXAMPLES / MODEL)})
    for method, path, text in (("POST", "/models", body), ("DELETE", f"/models/{OTHER}", "")):
        async with Wire(books) as wire:
            first = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
            head = f"{first}Content-Length: {len(text)}\r\n\r\n"
            wire.writer.write((head + text).encode())
            found = await wire.reader.readuntil(b"\r\n\r\n")
        if found.split()[1] not in {b"200", b"404", b"409"}:
            books.wrong.append(f"{method} {path}: {found!r}")


async def storm(adapter: RunningAdapter, seconds: float, seed: int) -> tuple[Books, int]:
    """And by how much the memory of the adapter has grown since a third of it."""
    async with TritonWire(adapter.http_address) as triton:
        forgery = await Forgery(triton).make()
    begin = asyncio.get_running_loop().time()
    books = Books(random.Random(seed), adapter.http, begin + seconds)
    acts = {
        asks_as_one_should: 10,
        forges(forgery): 4,
        hangs_up_while_the_model_computes: 3,
        dawdles: 4,
        loads_and_unloads: 1,
    }

    async def go_on(act: Callable[[Books], Awaitable[None]]) -> None:
        is_valid = act is asks_as_one_should or act.__name__ == "act"
        while not books.is_over:
            books.done[act.__name__] += 1
            try:
                # of many requests on one connection each has its own time
                async with asyncio.timeout(None if act is asks_as_one_should else MOST_SECONDS):
                    await act(books)
            except TimeoutError:
                books.wrong.append(f"{act.__name__}: no answer within {MOST_SECONDS} s")
            except (OSError, asyncio.IncompleteReadError) as error:
                if is_valid:
                    books.valid[type(error).__name__] += 1

    async with asyncio.TaskGroup() as group:
        for act, callers in acts.items():
            for _ in range(callers):
                group.create_task(go_on(act))
        await asyncio.sleep(seconds / 3)
        resident = resident_bytes(adapter)
    return books, resident_bytes(adapter) - resident


def check_rest(adapter: RunningAdapter) -> None:
    def left() -> list[int]:
        models = adapter.state()["models"]
        return [model["in_flight"] + model["abandoned"] for model in models if model["in_flight"]]

    wait_until(lambda: left() == [], 60, "no request holds a model")
    lines = [
        f'triton_adapter_requests_in_flight{{frontend="{one}"}}' for one in ("sagemaker", "v2")
    ]
    for line in ("triton_adapter_abandoned_requests", *lines):
        wait_until(lambda line=line: metric(adapter, line) == 0, 15, f"{line} is 0")
    wait_until(lambda: connections_at(adapter) == 0, 30, "no connection of a caller is left")


def connections_at(adapter: RunningAdapter) -> int:
    """Established or half closed ones at the HTTP listener."""
    port = int(adapter.http.rsplit(":", 1)[1])
    rows = Path("/proc", str(adapter.process.pid), "net", "tcp").read_text().splitlines()[1:]
    fields = [row.split() for row in rows]
    return sum(
        int(each[1].rsplit(":", 1)[1], 16) == port and each[3] in {"01", "08"} for each in fields
    )


def test_who_asks_as_one_should_is_answered_whatever_others_do(seconds, seed, tmp_path):
    write_python_model(tmp_path / SLOW, imports="import time", answer="time.sleep(0.2)")
    with embedded_adapter(f"--model-roots={tmp_path}") as adapter:
        with closing(adapter.client()) as client:
            assert client.load(MODEL, EXAMPLES / MODEL).status == 200
            assert client.load(SLOW, tmp_path / SLOW).status == 200
        books, grown = asyncio.run(storm(adapter, seconds, seed))
        told = f"seed {seed}: {dict(books.done)}, valid: {dict(books.valid)}, grown {grown}"
        sys.stdout.write(f"{told}\n")
        assert not books.wrong, f"{told}; {books.wrong}"
        assert not adapter.events("triton.exited"), told
        assert books.valid["200"] >= 0.95 * books.valid.total(), told
        assert grown < GROWTH_BYTES, told
        check_rest(adapter)
        with closing(adapter.client()) as client:
            for model in (MODEL, SLOW):
                assert client.delete(f"/models/{model}").status == 200
        assert not [line for line in adapter.events("request.failed") if "exception" in line]
