"""Stands in for Triton where ten thousand real models would not fit: it loads, lists, unloads and
infers at once and without a model. Run as a program it prints its two ports.

The calls that the adapter makes are answered as Triton 2.51 does, as far as the adapter looks at
them; `tests/contract` says what a real one does.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import httptools
import uvloop
from tritonclient.grpc import service_pb2 as messages

_TENSOR = {"name": "IN", "datatype": "FP32", "shape": [-1]}
METADATA = {"name": "m", "versions": ["1"], "inputs": [_TENSOR], "outputs": [_TENSOR]}
ANSWER = {
    "model_name": "m",
    "outputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [0.5]}],
}


def _http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class _Http(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        body = ANSWER if self._url.endswith(b"/infer") else METADATA
        if self._url.startswith(b"/metrics"):
            self._transport.write(_http(b""))
        else:
            self._transport.write(_http(json.dumps(body).encode()))


class _Grpc(grpc.GenericRpcHandler):
    """`index` is the answer as bytes, ready to be sent: joining the entries of ten thousand models
    for each answer took longer than all that the adapter does with it.
    """

    def __init__(self) -> None:
        self.index = bytearray()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method.rpartition("/")[2]
        known = {
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        plain = {
            "ServerLive": messages.ServerLiveResponse(live=True),
            "ServerReady": messages.ServerReadyResponse(ready=True),
            "ModelReady": messages.ModelReadyResponse(ready=True),
            "ServerMetadata": messages.ServerMetadataResponse(name="triton", version="2.51.0"),
        }

        async def tell(_request: bytes, _context: object) -> bytes:
            return plain[name].SerializeToString()

        return grpc.unary_unary_rpc_method_handler(known.get(name, tell))

    async def _index(self, _request: bytes, _context: object) -> bytes:
        return bytes(self.index)

    async def _load(self, request: bytes, _context: object) -> bytes:
        self.index += _entry(messages.RepositoryModelLoadRequest.FromString(request).model_name)
        return b""

    async def _unload(self, request: bytes, _context: object) -> bytes:
        entry = _entry(messages.RepositoryModelUnloadRequest.FromString(request).model_name)
        at = self.index.rfind(entry)  # a model that comes and goes is among the last
        if at >= 0:
            del self.index[at : at + len(entry)]
        return b""


def _entry(name: str) -> bytes:
    """What the index says of one model: messages one behind the other are one message."""
    entry = messages.RepositoryIndexResponse()
    entry.models.add(name=name, version="1", state="READY")
    return entry.SerializeToString()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    http = await loop.create_server(_Http, "127.0.0.1", 0)
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((_Grpc(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{http.sockets[0].getsockname()[1]} {port}\n")
    sys.stdout.flush()
    over = asyncio.Event()
    loop.add_reader(0, over.set)  # the pipe's other end is gone
    await over.wait()
    await server.stop(None)


@dataclass(frozen=True, slots=True)
class StandIn:
    http: str
    grpc: str


@contextmanager
def running() -> Iterator[StandIn]:
    command = (sys.executable, "-m", "tests.benchmarks.stand_in")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        http, grpc_port = process.stdout.readline().split()
        try:
            yield StandIn(f"127.0.0.1:{int(http)}", f"127.0.0.1:{int(grpc_port)}")
        finally:
            process.stdin.close()
            process.wait(10)


if __name__ == "__main__":
    uvloop.run(_serve())
