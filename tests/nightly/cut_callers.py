"""Callers that ask one numbered question after the other, and know which answer is theirs."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from adapter.frontends.http.binary import MEDIA_TYPE
from tests.nightly.cutting import Relay

MODEL = "echo"
BIG = 75_000
MOST_SECONDS = 30
# What an event may need to reach the adapter, on a machine that is busy.
SLACK_SECONDS = 1.0

_INFER = f"/{pb.DESCRIPTOR.services_by_name['GRPCInferenceService'].full_name}/ModelInfer"
_LENGTH = "inference-header-content-length"
_QUICK = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # grpc gives up by itself what it is about to begin when GOAWAY or the end of the connection
    # comes, and repeats it if it has kept it: 256 KiB by default
    ("grpc.per_rpc_retry_buffer_size", 2**20),
)


class Wrong(Exception):
    """What must not happen."""


class Books:
    """`seen`: answers by kind. `faults`: what broke a rule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []
        self.is_over = False
        self._number = 0

    def question(self) -> np.ndarray:
        """No two are alike, nor is a part of one like another."""
        self._number += 1
        size = BIG if self.random.random() < 0.15 else self.random.randint(1, 40)
        return np.arange(self._number, self._number + size, dtype=np.float32)


class Caller:
    """`own`: this caller's own relay before the listener; `behind`: the one before Triton."""

    kind = ""

    def __init__(self, books: Books, own: Relay, behind: Relay) -> None:
        self.books = books
        self.own = own
        self.behind = behind

    async def run(self) -> None:
        while not self.books.is_over:
            await self.one()
        await self.close()

    async def one(self) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(MOST_SECONDS):
                found = await self.ask(self.books.question())
        except TimeoutError:
            found = "no answer"
        except (OSError, EOFError) as error:
            await self.close()
            found = f"lost: {type(error).__name__}"
        except Wrong as wrong:
            found = f"wrong: {wrong}"
        self.books.seen[f"{self.kind} {found.split(':')[0]}"] += 1
        if not self._is_right(found, begun):
            self.books.faults.append(f"{self.kind}: {found}")

    def _is_right(self, found: str, begun: float) -> bool:
        if found == "answered":
            return True
        if found.startswith("lost"):
            return self.own.was_cut(begun, SLACK_SECONDS)
        return found.startswith("unavailable") and self.behind.was_cut(begun, SLACK_SECONDS)

    async def ask(self, question: np.ndarray) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def check(question: np.ndarray, raw: bytes) -> None:
    if raw != question.tobytes():
        given = np.frombuffer(raw[:4], np.float32)
        raise Wrong(f"answer of {len(raw)} bytes from {given} on, to {question[:1]}")


class Rest(Caller):
    """One kept connection, over SageMaker's listener or V2's."""

    kind = "http"

    def __init__(self, books: Books, own: Relay, behind: Relay) -> None:
        super().__init__(books, own, behind)
        self._wires: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, question: np.ndarray) -> str:
        if self._wires is None:
            host, port = self.own.address.split(":")
            self._wires = await asyncio.open_connection(host, int(port), limit=2**20)
        reader, writer = self._wires
        writer.write(self._request(question))
        await writer.drain()
        status, headers, body = await _answer(reader)
        if headers.get("connection") == "close":
            await self.close()
        if status != 200:
            return _refusal(status, body)
        check(question, _values(headers, body))
        return "answered"

    def _request(self, question: np.ndarray) -> bytes:
        is_sagemaker, is_binary = self.books.random.random() < 0.5, len(question) == BIG
        tensor = {"name": "IN", "datatype": "FP32", "shape": [len(question)]}
        tail, wanted, fields = b"", {}, {}
        if is_binary:
            tail = question.tobytes()
            tensor["parameters"] = {"binary_data_size": len(tail)}
            wanted = {"parameters": {"binary_data_output": True}}
        else:
            tensor["data"] = question.tolist()
        head = json.dumps({"inputs": [tensor], **wanted}).encode()
        if is_binary and is_sagemaker:
            fields = {"Content-Type": f"{MEDIA_TYPE};json-header-size={len(head)}"}
        elif is_binary:
            fields = {_LENGTH: len(head)}
        path = f"/models/{MODEL}/invoke" if is_sagemaker else f"/v2/models/{MODEL}/infer"
        fields |= {"Host": "localhost", "Content-Length": len(head) + len(tail)}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {said}" for name, said in fields.items())]
        return "\r\n".join([*lines, "\r\n"]).encode() + head + tail

    async def close(self) -> None:
        wires, self._wires = self._wires, None
        if wires is not None:
            wires[1].close()
            with contextlib.suppress(OSError):
                await wires[1].wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.lower(): said.strip() for name, _, said in pairs}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, body


def _refusal(status: int, body: bytes) -> str:
    said = json.loads(body)
    if (status, said.get("code")) == (503, "BackendUnavailable"):
        return f"unavailable: {said}"
    if status == 400 and "broke off" in said["error"]:
        return f"lost: {said}"  # of a caller whose half was closed
    return f"refused: {status} {said}"


def _values(headers: dict[str, str], body: bytes) -> bytes:
    size = headers.get(_LENGTH) or headers.get("content-type", "").partition("size=")[2]
    if size:
        return body[int(size) :]
    return np.array(json.loads(body)["outputs"][0]["data"], np.float32).tobytes()


class Grpc(Caller):
    """One channel. No streams: Triton 2.51 dies of those that lose their connection (SIGSEGV)."""

    kind = "grpc"

    def __init__(self, books: Books, own: Relay, behind: Relay) -> None:
        super().__init__(books, own, behind)
        self._channel = grpc.aio.insecure_channel(own.address, options=_QUICK)
        self._infer = self._channel.unary_unary(
            _INFER,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )

    async def ask(self, question: np.ndarray) -> str:
        try:
            answer = await self._infer(_message(question), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return _failure(error.code(), error.details() or "")
        check(question, answer.raw_output_contents[0])
        return "answered"

    async def close(self) -> None:
        if self.books.is_over:
            await self._channel.close()


def _failure(code: grpc.StatusCode, text: str) -> str:
    if code != grpc.StatusCode.UNAVAILABLE:
        return f"refused: {code.name} {text}"
    is_told = text.startswith("BackendUnavailable")
    return f"{'unavailable' if is_told else 'lost'}: {text}"


def _message(question: np.ndarray) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name=MODEL,
        inputs=[{"name": "IN", "datatype": "FP32", "shape": [len(question)]}],
        raw_input_contents=[question.tobytes()],
    )
