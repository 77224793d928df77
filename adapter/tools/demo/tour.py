"""Runs a guided tour on a terminal: an adapter and its own Triton, with real models."""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as mesh
from adapter.app import Adapter
from adapter.cli.options import examples_folder
from adapter.cli.serving import LACKS_ONNXRUNTIME, lacks_onnxruntime
from adapter.cli.text import DIM, GREEN, RED, coloured, printable_lines, width
from adapter.core.sizing import format_size
from adapter.errors import AdapterError
from adapter.settings import load_settings
from adapter.telemetry.log import setup_logging
from adapter.tools.demo.endpoint import LACKING, EndpointTour, bucket, lacks_bucket
from adapter.tools.demo.output import (
    PLAIN_COLUMNS,
    State,
    StepFailed,
    bar,
    check,
    detail,
    say,
    shown_meanwhile,
    title,
)

_SERVE = "triton-adapter serve --triton=embedded --examples"
# The example models pretend to share a device of 2 GiB; the ledger gets the same limit. What they
# take is host memory, so that is read on machines with GPUs as well.
_SETTINGS: dict[str, object] = {
    "triton": "embedded",
    "http": "127.0.0.1:0",
    "grpc": "127.0.0.1:0",
    "admin": "127.0.0.1:0",
    "triton_http": "127.0.0.1:0",
    "triton_grpc": "127.0.0.1:0",
    "triton_metrics": "127.0.0.1:0",
    "memory_source": "host",
    "memory_limit": "2GiB",
    "memory_reserve": "0",
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any


class MeshCalls:
    """Make the calls that a mesh makes of a runtime."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def load(self, name: str, path: Path) -> int:
        request = mesh.LoadModelRequest(modelId=name, modelPath=str(path))
        answer = await self._call("mmesh.ModelRuntime/loadModel", request)
        return int(mesh.LoadModelResponse.FromString(answer).sizeInBytes)

    async def unload(self, name: str) -> None:
        request = mesh.UnloadModelRequest(modelId=name)
        await self._call("mmesh.ModelRuntime/unloadModel", request)

    async def labels(self, name: str, sample: Mapping[str, Any]) -> list[int]:
        [image] = sample["inputs"]
        pixels = np.array(image["data"], np.float32).tobytes()
        tensor = {"name": image["name"], "datatype": "FP32", "shape": image["shape"]}
        request = v2.ModelInferRequest(inputs=[tensor], raw_input_contents=[pixels])
        method = "inference.GRPCInferenceService/ModelInfer"
        answer = v2.ModelInferResponse.FromString(
            await self._call(method, request, (("mm-model-id", name),))
        )
        place = [output.name for output in answer.outputs].index("LABEL")
        return list(map(int, np.frombuffer(answer.raw_output_contents[place], np.int64)))

    async def _call(
        self, method: str, request: Any, metadata: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"/{method}"
        )
        return bytes(await call(request.SerializeToString(), metadata=metadata, timeout=60))


class Tour:
    def __init__(
        self, session: aiohttp.ClientSession, addresses: Mapping[str, str], scratch: Path
    ) -> None:
        self._session = session
        self._base = f"http://{addresses['http']}"
        self._admin = f"http://{addresses['admin']}"
        self._grpc = addresses["grpc"]
        self._scratch = scratch

    async def run(self) -> None:
        await self._serve_a_model()
        await self._run_out_of_memory()
        await self._refuse_in_advance()
        await self._run_out_of_memory_while_invoked()
        await self._use_the_same_model_as_a_mesh_does()
        await self._unload_everything()

    async def _serve_a_model(self) -> None:
        title("A trained model: handwritten digits")
        say("(the bar is the memory: a model's part has its first letter, + is not counted yet)")
        await self._load("digits", examples_folder() / "digits")
        listed = await self._call("GET", "/models", expect=200)
        names = [model["modelName"] for model in listed.body["models"]]
        check(names == ["digits"], f"GET /models lists {names}")
        sample = json.loads((examples_folder() / "digits" / "sample.json").read_text())
        answer = await self._call("POST", "/models/digits/invoke", sample, expect=200)
        labels = next(o["data"] for o in answer.body["outputs"] if o["name"] == "LABEL")
        check(labels == sample["labels"], f"it reads {labels}; the truth is {sample['labels']}")

    async def _run_out_of_memory(self) -> None:
        title("Out of memory at load: models of 700, 700 and 750 MiB, a device of 2 GiB")
        say(
            "(the models take real memory of this machine; there is no GPU in it: what is more "
            "than 2 GiB the model itself refuses, with the error that a GPU's allocator raises)"
        )
        for name in ("alpha", "beta"):
            await self._load(name, self._copy(name))
        # The size of a new package is unknown, so Triton tries to load it, and fails.
        gamma = self._copy("gamma", "750MiB")
        refused = await self._try_load("gamma", gamma, expect=507)
        check(refused.body["code"] == "OutOfMemory", "Triton tried and failed")
        _show_figures(refused.body)
        say("so the platform evicts a model that it does not need now, and tries again:")
        await self._unload("alpha")
        await self._load("gamma", gamma)
        say("it fits")

    async def _refuse_in_advance(self) -> None:
        title("A size once measured: refused before anybody tries")
        refused = await self._try_load("alpha", self._scratch / "alpha", expect=507)
        check(refused.body["code"] == "InsufficientMemory", "refused at once, nothing was tried")
        _show_figures(refused.body)
        await self._unload("beta")
        await self._load("alpha", self._scratch / "alpha")
        say("it fits")

    async def _run_out_of_memory_while_invoked(self) -> None:
        title("Out of memory while a model computes")
        await self._load("hungry_infer", examples_folder() / "hungry_infer")
        body = {"inputs": [{"name": "MIB", "datatype": "INT64", "shape": [1], "data": [1000]}]}
        path = "/models/hungry_infer/invoke"
        failed = await self._call("POST", path, body, expect=507, is_drawn=True)
        _show_figures(failed.body)
        say("evict, and the same request is answered:")
        await self._unload("alpha")
        await self._call("POST", path, body, expect=200, is_drawn=True)

    async def _use_the_same_model_as_a_mesh_does(self) -> None:
        title("The same model through ModelMesh, over gRPC")
        sample = json.loads((examples_folder() / "digits" / "sample.json").read_text())
        async with grpc.aio.insecure_channel(self._grpc) as channel:
            calls = MeshCalls(channel)
            size = await calls.load("digits", examples_folder() / "digits")
            check(size > 0, f"loadModel digits: loaded already, and takes {format_size(size)}")
            labels = await calls.labels("digits", sample)
            check(labels == sample["labels"], f"ModelInfer by the header mm-model-id: {labels}")
            await calls.unload("digits")
        listed = await self._call("GET", "/models", expect=200)
        names = [model["modelName"] for model in listed.body["models"]]
        check("digits" not in names, f"unloadModel digits: GET /models lists {names}")

    async def _unload_everything(self) -> None:
        title("The rest is unloaded")
        listed = await self._call("GET", "/models", expect=200)
        for model in listed.body["models"]:
            await self._unload(model["modelName"])
        left = await self._call("GET", "/models", expect=200)
        check(left.body["models"] == [], "nothing is loaded any more")

    def _copy(self, name: str, size: str = "700MiB") -> Path:
        package = Path(shutil.copytree(examples_folder() / "hungry", self._scratch / name))
        config = package / "config.pbtxt"
        config.write_text(config.read_text().replace("700MiB", size))
        return package

    async def _load(self, name: str, url: Path) -> None:
        await self._try_load(name, url, expect=200)

    async def _try_load(self, name: str, url: Path, *, expect: int) -> Answer:
        body = {"model_name": name, "url": str(url)}
        return await self._call("POST", "/models", body, expect=expect, note=name, is_drawn=True)

    async def _unload(self, name: str) -> None:
        await self._call("DELETE", f"/models/{name}", expect=200, is_drawn=True)

    async def _state(self) -> State:
        async with self._session.get(f"{self._admin}/debug/state") as response:
            return cast("State", await response.json())

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        expect: int,
        note: str = "",
        is_drawn: bool = False,
    ) -> Answer:
        """Make a call and check its status; with `is_drawn` draw the memory during and after it."""
        begun = time.monotonic()
        async with (
            shown_meanwhile(self._state) if is_drawn else nullcontext(),
            self._session.request(method, self._base + path, json=body) as response,
        ):
            answer = Answer(response.status, await response.json(content_type=None))
        seconds = time.monotonic() - begun
        line = f"{method} {path} {note}".strip()
        check(
            answer.status == expect,
            f"{line:<38} {answer.status}   {coloured(f'{seconds:6.2f} s', DIM)}",
            more=json.dumps(answer.body),
        )
        if is_drawn:
            detail(bar(await self._state()))
        return answer


def run_demo(flags: Mapping[str, object]) -> int:
    """Run the tour; return 0 only if every step did what it says.

    SIGTERM ends it as Ctrl-C does: what it has started and written is gone then.
    """
    if "tritonserver" not in flags and lacks_onnxruntime():
        sys.stderr.write(f"triton-adapter demo: {LACKS_ONNXRUNTIME}\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="triton-adapter-demo-") as scratch:
        roots = [scratch, str(examples_folder())]
        loaded = load_settings({**_SETTINGS, "model_roots": roots, **flags}, {}, None)
        log = Path(scratch) / "log"
        with log.open("w") as stream:
            setup_logging(loaded.settings.log_level, "text", stream)
            code = asyncio.run(_until_signal(_demo(Adapter(loaded), flags, Path(scratch))))
        if code is None:
            say("stopped by a signal; nothing is left running")
        elif code != 0:
            say("The end of the log:\n" + "\n".join(log.read_text().splitlines()[-30:]))
        return 1 if code is None else code


async def _until_signal(touring: Coroutine[Any, Any, int]) -> int | None:
    """Return the exit code of the tours, or None if a signal has ended them."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    tour, stopping = asyncio.create_task(touring), asyncio.create_task(asked.wait())
    await asyncio.wait([tour, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not tour.done():  # cancelled once: another signal must not break off its end
        say("stopping Triton and removing temporary files")
        tour.cancel()
        await asyncio.wait([tour])
    return None if tour.cancelled() else tour.result()


async def _demo(adapter: Adapter, flags: Mapping[str, object], scratch: Path) -> int:
    begun = time.monotonic()
    try:
        await _tour_container(adapter, scratch)
        if lacks_bucket():
            say(f"(the tour of a multi-model endpoint is left out: {LACKING})")
        else:
            with bucket(scratch):
                await EndpointTour({**_SETTINGS, **flags}, scratch).run()
    except StepFailed:
        return 1
    except (AdapterError, grpc.aio.AioRpcError) as error:
        say(coloured(printable_lines(str(error)), RED))
        return 1
    done = coloured("Every step succeeded", GREEN)
    print(f"\n{done} ({time.monotonic() - begun:.0f} s).\nNext: make run, or {_SERVE}")
    return 0


async def _tour_container(adapter: Adapter, scratch: Path) -> None:
    begun = time.monotonic()
    try:
        title("An adapter and a stock Triton")
        await adapter.start()
        seconds = time.monotonic() - begun
        check(is_met=True, text=f"both are up after {seconds:.1f} s")
        async with aiohttp.ClientSession() as session:
            await Tour(session, adapter.addresses, scratch).run()
    finally:
        await adapter.stop()


def _show_figures(body: dict[str, Any]) -> None:
    """Print the whole error text, and its figures in units that people read."""
    text = body["error"].splitlines()[0]
    for line in textwrap.wrap(text, (width() or PLAIN_COLUMNS) - 10, break_long_words=False):
        detail(coloured(line, DIM))
    figures = [
        f"{kind} {format_size(body[f'{kind}_bytes'])}"
        for kind in ("needed", "free", "limit")
        if body[f"{kind}_bytes"] is not None
    ]
    matched = f"; known by the words {body['matched']!r}" if body["matched"] else ""
    detail(coloured(f"{', '.join(figures)}{matched}", DIM))
    if len(figures) < len(("needed", "free", "limit")):
        raise StepFailed("an out-of-memory answer without all its figures")
