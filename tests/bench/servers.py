"""Small real servers in a thread of their own, and the command that is run against them."""

import argparse
import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2

from adapter.tools.bench.command import add_arguments, measure
from adapter.tools.bench.errors import BadArguments, BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

METADATA = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 2]}]}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


@dataclass
class Bench:
    """Runs the command as the command line does; the result is that of --json."""

    folder: Path
    code: int = -1
    problems: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *argv: str) -> "Bench":
        path = self.folder / "result.json"
        self.problems, self.result = [], {}
        try:
            self.code = measure(parse("--warmup=0", f"--json={path}", *argv))
            self.result = json.loads(path.read_text())
        except BadArguments as error:
            self.code, self.problems = 2, error.problems
        except BenchError as error:
            self.code, self.problems = 1, [str(error)]
        return self

    @property
    def target(self) -> dict[str, Any]:
        return self.result["targets"][0]

    @property
    def errors(self) -> dict[str, int]:
        return {each["code"]: each["count"] for each in self.target["errors_by_code"]}


def holds_once(attempt: "Callable[[], bool]", tries: int = 5) -> bool:
    """Whether it holds at one of some tries: of a measurement that other work of the machine may
    spoil, but not make right.
    """
    return any(attempt() for _ in range(tries))


class InThread:
    """A loop of its own; `start` and `stop` run there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.call(self.start())

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.call(self.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()


class HttpServer(InThread):
    """Models answer well but for `busy` (503 with a code), `broken` (500, text), `closing`
    (well, and closes), `rude` (closes without an answer) and `mute` (no answer).
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._socket = socket
        self.seen: Counter[str] = Counter()
        self.bodies: list[tuple[dict[str, str], bytes]] = []
        self.loaded: list[str] = []
        self.changes: list[tuple[str, Any]] = []
        self.is_refusing = False
        self.on_request: Callable[[int], None] = lambda _: None
        super().__init__()

    async def start(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        app = web.Application(client_max_size=2**27)
        app.router.add_get("/v2/models/{name}", self._metadata)
        app.router.add_get("/models", self._list)
        app.router.add_post("/models", self._load)
        app.router.add_delete("/models/{name}", self._unload)
        app.router.add_post("/models/{name}/invoke", self._infer)
        app.router.add_post("/v2/models/{name}/infer", self._infer)
        app.router.add_post("/endpoints/{endpoint}/invocations", self._infer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        if self._socket:
            await web.UnixSite(self._runner, self._socket).start()
            self.url = f"unix:{self._socket}"
        else:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.gate.set()
        await self._runner.cleanup()

    def stall(self, seconds: float) -> None:
        """From now on, in the loop of the server."""
        self.gate.clear()
        self.loop.call_later(seconds, self.gate.set)

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response({"name": request.match_info["name"], **METADATA})

    async def _list(self, request: web.Request) -> web.Response:
        token = request.query.get("next_page_token")
        page = ["c"] if token else ["a", "b"]
        more = {} if token else {"nextPageToken": "more"}
        return web.json_response({"models": [{"modelName": name} for name in page], **more})

    async def _load(self, request: web.Request) -> web.Response:
        given = await request.json()
        if self.is_refusing:
            return web.json_response({"error": "no room", "code": "OutOfMemory"}, status=507)
        self.changes.append(("load", given))
        return web.json_response({})

    async def _unload(self, request: web.Request) -> web.Response:
        self.changes.append(("unload", request.match_info["name"]))
        return web.json_response({})

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        target = request.headers.get("X-Amzn-SageMaker-Target-Model", "")
        name = request.match_info.get("name", target)
        self.seen[name] += 1
        body = await request.read()
        if len(self.bodies) < 10:
            self.bodies.append((request.headers.copy(), body))
        self.on_request(self.seen.total())
        await self.gate.wait()
        match name:
            case "busy":
                return web.json_response({"error": "later", "code": "ModelNotReady"}, status=503)
            case "broken":
                return web.Response(status=500, text="it raised")
            case "rude":
                assert request.transport is not None
                request.transport.abort()
            case "mute":
                await asyncio.Event().wait()
        response = web.json_response({"outputs": []})
        if name == "closing":
            response.force_close()
        return response


class GrpcServer(InThread, grpc.GenericRpcHandler):
    """Model `missing` is NOT_FOUND, `mute` never answers; all others give their tensors back."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.metadata: Counter[str] = Counter()
        self.every: set[str] = set()  # values of x-every
        self.largest = 0
        super().__init__()

    async def start(self) -> None:
        sizes = ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)
        self._server = grpc.aio.server(options=sizes)
        self._server.add_generic_rpc_handlers((self,))
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        is_metadata = details.method == "/inference.GRPCInferenceService/ModelMetadata"
        return grpc.unary_unary_rpc_method_handler(self._tell if is_metadata else self._infer)

    async def _tell(self, _request: bytes, _context: Any) -> bytes:
        answer = service_pb2.ModelMetadataResponse(name="m", **METADATA)
        return answer.SerializeToString()

    async def _infer(self, request: bytes, context: Any) -> bytes:
        message = service_pb2.ModelInferRequest.FromString(request)
        self.seen[message.model_name] += 1
        self.largest = max(self.largest, len(request))
        given = dict(context.invocation_metadata())
        self.metadata[str(given.get("mm-model-id"))] += 1
        self.every.add(str(given.get("x-every")))
        if message.model_name == "missing":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no model\nof that näme")
        if message.model_name == "mute":
            await asyncio.Event().wait()
        answer = service_pb2.ModelInferResponse(raw_output_contents=message.raw_input_contents)
        return answer.SerializeToString()
