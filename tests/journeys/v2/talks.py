"""tritonclient's four clients behind one face, so that one test can ask all of them."""

import asyncio
import importlib
import inspect
import queue
from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException


class Talk:
    """`call` waits where the client is asynchronous. Values are plain Python, for comparing."""

    def __init__(self, client: str, address: str) -> None:
        self.is_grpc = client.startswith("grpc")
        self.is_aio = client.endswith("aio")
        self.module = importlib.import_module(f"tritonclient.{client}")
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._open(address)) if self.is_aio else self._new(address)

    def _new(self, address: str) -> Any:
        return self.module.InferenceServerClient(address)

    async def _open(self, address: str) -> Any:
        return self._new(address)

    def close(self) -> None:
        self.call("close")
        self._runner.close()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        found = getattr(self._client, method)(*args, **options)
        return self._runner.run(_awaited(found)) if inspect.isawaitable(found) else found

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """What is answered with JSON, or is in gRPC."""
        if self.is_grpc and method.startswith("get_"):
            options["as_json"] = True
        return self.call(method, *args, **options)

    def input(self, name: str, kind: str, values: Any, *, binary: bool = True) -> Any:
        given = self.module.InferInput(name, list(values.shape), kind)
        options = {} if self.is_grpc else {"binary_data": binary}
        given.set_data_from_numpy(values, **options)
        return given

    def output(self, name: str, *, binary: bool = True, class_count: int = 0) -> Any:
        options = {} if self.is_grpc else {"binary_data": binary}
        return self.module.InferRequestedOutput(name, class_count=class_count, **options)

    def infer(self, model: str, inputs: list[Any], **options: Any) -> Any:
        return self.plain(self.call("infer", model, inputs, **options))

    def stream(self, requests: list[dict[str, Any]], answers: int) -> list[Any]:
        """So many answers of one stream with these requests."""
        if self.is_aio:
            return self._runner.run(asyncio.wait_for(self._stream(requests, answers), 30))
        ended: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: ended.put(error or result))
        for request in requests:
            self._client.async_stream_infer(**request)
        found = [self.plain(ended.get(timeout=30)) for _ in range(answers)]
        self._client.stop_stream()
        assert ended.empty()
        return found

    async def _stream(self, requests: list[dict[str, Any]], answers: int) -> list[Any]:
        enough = asyncio.Event()

        async def asked() -> Any:
            for request in requests:
                yield request
            await enough.wait()

        found = []
        async for result, error in self._client.stream_infer(asked()):
            found.append(self.plain(error or result))
            if len(found) == answers:
                enough.set()
        assert len(found) == answers
        return found

    def plain(self, result: Any) -> Any:
        if isinstance(result, InferenceServerException):
            return failure(result)
        response = result.get_response()
        if self.is_grpc:
            response = MessageToDict(response, preserving_proto_field_name=True)
            response.pop("raw_output_contents", None)
        values = {out["name"]: result.as_numpy(out["name"]) for out in response.get("outputs", [])}
        return response, {
            name: (str(value.dtype), value.tolist()) for name, value in values.items()
        }


async def _awaited(found: Any) -> Any:
    return await found


def failure(error: InferenceServerException) -> tuple[str, str | None]:
    return type(error).__name__, error.status()


def outcome(call: Callable[[], Any]) -> Any:
    """What it returned, or how it failed."""
    try:
        return call()
    except InferenceServerException as error:
        return failure(error)
