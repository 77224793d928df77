"""Tensors that hold whole HTTP answers are bytes of a body, whatever pieces they come in.

Who sends one to a model that passes its input on would like to say what the next caller on that
connection to Triton is answered.
"""

import asyncio
import json
from contextlib import closing
from itertools import count
from typing import Self

import pytest

from tests.frontends.http.listener import request
from tests.running import EXAMPLES, RunningAdapter

BLOCK = 2**14  # Triton writes an answer in pieces of so many bytes
BLOCKS, ATTACKS, ATTACKERS, OTHERS, BUSY = 16, 25, 4, 8, 4
LENGTH = "Inference-Header-Content-Length"


# -- byte by byte ----------------------------------------------------------------------------------


# -- the real Triton -------------------------------------------------------------------------------


def tensor_request(ident: str, values: bytes) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values) // 4]}
    tensor["parameters"] = {"binary_data_size": len(values)}
    wanted = {"parameters": {"binary_data_output": True}}
    head = json.dumps({"id": ident, "inputs": [tensor], **wanted}).encode()
    return request("/v2/models/identity/infer", head + values, f"{LENGTH}: {len(head)}")


class Wire:
    """A kept connection to an HTTP listener."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def __aenter__(self) -> Self:
        host, port = self.address.split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port), limit=2**20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def ask(self, data: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer."""
        self.writer.write(data)
        await self.writer.drain()
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"\r\nContent-Length: ")[2].partition(b"\r\n")[0])
        return head, await self.reader.readexactly(length)


class Forgery:
    """A tensor full of one answer that Triton has given before, at the begin of each block."""

    def __init__(self, triton: Wire) -> None:
        self._triton = triton
        self.ident = ""
        self.learned = b""
        self.tensor = b""

    async def make(self) -> Self:
        raw = b""
        while len(raw) != BLOCK:
            self.ident += "x"
            frame = len(await self._answer(bytes(BLOCK - 512))) - (BLOCK - 512)
            self.learned = b"EVIL" * ((BLOCK - frame) // 4)
            raw = await self._answer(self.learned)
        blocks = raw * BLOCKS
        begin = len(await self._answer(blocks)) - len(blocks)
        self.tensor = blocks[begin:] + bytes(begin % 4)
        return self

    async def _answer(self, values: bytes) -> bytes:
        head, body = await self._triton.ask(tensor_request(self.ident, values))
        return head + body


class Books:
    """Who asks what, and whether the answer is the right one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_over = False
        self.answered = 0
        self._numbers = count(1)

    async def attack(self, forgery: Forgery) -> None:
        for _ in range(ATTACKS):
            async with Wire(self.address) as wire:
                await self._check(wire, forgery.ident, forgery.learned)
                await self._check(wire, forgery.ident, forgery.tensor)

    async def others(self, floats: int) -> None:
        async with Wire(self.address) as wire:
            while not self.is_over:
                await self._check(wire, str(next(self._numbers)), b"GOOD" * floats)

    async def _check(self, wire: Wire, ident: str, values: bytes) -> None:
        head, body = await wire.ask(tensor_request(ident, values))
        assert head.startswith(b"HTTP/1.1 200 "), (head, body[:200])
        assert body.endswith(values), (body[:500], values[:20])
        assert json.loads(body[: -len(values)])["id"] == ident
        self.answered += 1


@pytest.mark.triton
async def test_no_caller_is_answered_with_what_another_one_sent(adapter: RunningAdapter):
    with closing(adapter.client()) as client:
        assert client.load("identity", EXAMPLES / "identity").status == 200
    books = Books(adapter.http)
    async with Wire(adapter.http_address) as triton, asyncio.timeout(90):
        forgery = await Forgery(triton).make()
        async with asyncio.TaskGroup() as group:
            for number in range(OTHERS + BUSY):
                group.create_task(books.others(1 if number < OTHERS else 100_000))
            async with asyncio.TaskGroup() as attackers:
                for _ in range(ATTACKERS):
                    attackers.create_task(books.attack(forgery))
            books.is_over = True
    assert books.answered > ATTACKS * ATTACKERS * 2
