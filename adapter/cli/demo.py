"""Runs a guided tour on a terminal: an adapter and its own Triton, with real models."""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as mesh
from adapter.app import Adapter
from adapter.core.sizing import format_size
from adapter.errors import AdapterError
from adapter.settings import load_settings
from adapter.settings.examples import examples_folder
from adapter.telemetry.log import setup_logging

_COLOURS = ("\033[1m", "\033[32m", "\033[31m", "\033[2m", "\033[0m")
_BOLD, _GREEN, _RED, _DIM, _END = _COLOURS if sys.stdout.isatty() else ("",) * len(_COLOURS)

# The example models pretend to share a device of 2 GiB; the ledger gets the same limit.
_SETTINGS: dict[str, object] = {
    "triton": "embedded",
    "http": "127.0.0.1:0",
    "grpc": "127.0.0.1:0",
    "admin": "127.0.0.1:0",
    "triton_http": "127.0.0.1:0",
    "triton_grpc": "127.0.0.1:0",
    "triton_metrics": "127.0.0.1:0",
    "memory_limit": "2GiB",
    "memory_reserve": "0",
    "examples": True,
}


class StepFailed(Exception):
    pass


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
        _title("A trained model: handwritten digits")
        await self._load("digits", examples_folder() / "digits")
        listed = await self._call("GET", "/models", expect=200)
        names = [model["modelName"] for model in listed.body["models"]]
        _check(names == ["digits"], f"GET /models lists {names}")
        sample = json.loads((examples_folder() / "digits" / "sample.json").read_text())
        answer = await self._call("POST", "/models/digits/invoke", sample, expect=200)
        labels = next(o["data"] for o in answer.body["outputs"] if o["name"] == "LABEL")
        _check(labels == sample["labels"], f"it reads {labels}; the truth is {sample['labels']}")

    async def _run_out_of_memory(self) -> None:
        _title("Out of memory at load, for real: 700 MiB a model, 2 GiB in all")
        for name in ("alpha", "beta"):
            await self._load(name, self._copy(name))
        # The size of a new package is unknown, so Triton tries to load it, and fails.
        gamma = self._copy("gamma", "750MiB")
        refused = await self._try_load("gamma", gamma, expect=507)
        _check(refused.body["code"] == "OutOfMemory", "Triton tried and failed")
        _show_figures(refused.body)
        _say("so the platform evicts a model that it does not need now, and tries again:")
        await self._unload("alpha")
        await self._load("gamma", gamma)

    async def _refuse_in_advance(self) -> None:
        _title("A size once measured: refused before anybody tries")
        refused = await self._try_load("alpha", self._scratch / "alpha", expect=507)
        _check(refused.body["code"] == "InsufficientMemory", "refused at once, nothing was tried")
        _show_figures(refused.body)
        await self._unload("beta")
        await self._load("alpha", self._scratch / "alpha")

    async def _run_out_of_memory_while_invoked(self) -> None:
        _title("Out of memory while a model computes")
        await self._load("hungry_infer", examples_folder() / "hungry_infer")
        body = {"inputs": [{"name": "MIB", "datatype": "INT64", "shape": [1], "data": [1000]}]}
        path = "/models/hungry_infer/invoke"
        failed = await self._call("POST", path, body, expect=507)
        _show_figures(failed.body)
        _say("evict, and the same request is answered:")
        await self._unload("alpha")
        await self._call("POST", path, body, expect=200)

    async def _use_the_same_model_as_a_mesh_does(self) -> None:
        _title("The same model through ModelMesh, over gRPC")
        sample = json.loads((examples_folder() / "digits" / "sample.json").read_text())
        async with grpc.aio.insecure_channel(self._grpc) as channel:
            calls = MeshCalls(channel)
            size = await calls.load("digits", examples_folder() / "digits")
            _check(size > 0, f"loadModel digits: loaded already, and takes {format_size(size)}")
            labels = await calls.labels("digits", sample)
            _check(labels == sample["labels"], f"ModelInfer by the header mm-model-id: {labels}")
            await calls.unload("digits")
        listed = await self._call("GET", "/models", expect=200)
        names = [model["modelName"] for model in listed.body["models"]]
        _check("digits" not in names, f"unloadModel digits: GET /models lists {names}")

    async def _unload_everything(self) -> None:
        _title("Everything goes")
        listed = await self._call("GET", "/models", expect=200)
        for model in listed.body["models"]:
            await self._unload(model["modelName"])
        left = await self._call("GET", "/models", expect=200)
        _check(left.body["models"] == [], "nothing is loaded any more")

    def _copy(self, name: str, size: str = "700MiB") -> Path:
        package = Path(shutil.copytree(examples_folder() / "hungry", self._scratch / name))
        config = package / "config.pbtxt"
        config.write_text(config.read_text().replace("700MiB", size))
        return package

    async def _load(self, name: str, url: Path) -> None:
        await self._try_load(name, url, expect=200)

    async def _try_load(self, name: str, url: Path, *, expect: int) -> Answer:
        body = {"model_name": name, "url": str(url)}
        return await self._call("POST", "/models", body, expect=expect, note=name)

    async def _unload(self, name: str) -> None:
        await self._call("DELETE", f"/models/{name}", expect=200)

    async def _call(
        self, method: str, path: str, body: Any = None, *, expect: int, note: str = ""
    ) -> Answer:
        begun = time.monotonic()
        async with self._session.request(method, self._base + path, json=body) as response:
            answer = Answer(response.status, await response.json(content_type=None))
        seconds = time.monotonic() - begun
        line = f"{method} {path} {note}".strip()
        _check(
            answer.status == expect,
            f"{line:<38} {answer.status}   {_DIM}{seconds:6.2f} s{_END}",
            detail=json.dumps(answer.body),
        )
        return answer


def run_demo(flags: Mapping[str, object]) -> int:
    """Run the tour; return 0 only if every step did what it says."""
    with tempfile.TemporaryDirectory(prefix="triton-adapter-demo-") as scratch:
        given = {**_SETTINGS, "model_roots": [scratch], **flags}
        loaded = load_settings(given, {}, None)
        log = Path(scratch) / "log"
        with log.open("w") as stream:
            setup_logging(loaded.settings.log_level, "text", stream)
            code = asyncio.run(_demo(Adapter(loaded), Path(scratch)))
        if code != 0:
            _say("The end of the log:\n" + "\n".join(log.read_text().splitlines()[-30:]))
        return code


async def _demo(adapter: Adapter, scratch: Path) -> int:
    begun = time.monotonic()
    try:
        _title("An adapter and a stock Triton")
        await adapter.start()
        _check(is_met=True, text=f"both are up after {time.monotonic() - begun:.1f} s")
        async with aiohttp.ClientSession() as session:
            await Tour(session, adapter.addresses, scratch).run()
    except StepFailed:
        return 1
    except (AdapterError, grpc.aio.AioRpcError) as error:
        _say(f"{_RED}{error}{_END}")
        return 1
    finally:
        await adapter.stop()
    print(f"\n{_GREEN}Every step did what it says{_END} ({time.monotonic() - begun:.0f} s).")
    return 0


def welcome(adapter: Adapter) -> None:
    """Print the listeners and three commands to paste, on stderr: stdout is for the log."""
    base, folder = f"http://{adapter.addresses['http']}", examples_folder()
    listeners = "\n".join(
        f"  {name:<9} {'' if name.startswith('grpc') else 'http://'}{at}"
        for name, at in adapter.addresses.items()
    )
    load = json.dumps({"model_name": "digits", "url": str(folder / "digits")})
    sys.stderr.write(
        f"\nReady. Listeners:\n{listeners}\n\nTry, in another terminal:\n\n"
        f"  curl -s -X POST {base}/models -d '{load}'\n"
        f"  curl -s -X POST {base}/models/digits/invoke --data @{folder / 'digits/sample.json'}\n"
        f"  curl -s -X DELETE {base}/models/digits\n\nCtrl-C stops everything.\n\n"
    )


def _title(text: str) -> None:
    print(f"\n{_BOLD}{text}{_END}")


def _say(text: str) -> None:
    print(f"  {text}")


def _check(is_met: bool, text: str, detail: str = "") -> None:
    print(f"  {_GREEN}ok{_END}    {text}" if is_met else f"  {_RED}FAIL{_END}  {text}\n  {detail}")
    if not is_met:
        raise StepFailed(text)


def _show_figures(body: dict[str, Any]) -> None:
    """The error text, and the bytes as the platform's operator would want them."""
    first_line = body["error"].splitlines()[0]
    print(f"  {_DIM}      {first_line[:150]}{_END}")
    figures = [
        f"{kind} {format_size(body[f'{kind}_bytes'])}"
        for kind in ("needed", "free", "limit")
        if body[f"{kind}_bytes"] is not None
    ]
    matched = f"   matched: {body['matched']}" if body["matched"] else ""
    print(f"  {_DIM}      {', '.join(figures)}{matched}{_END}")
    if len(figures) < len(("needed", "free", "limit")):
        raise StepFailed("an out-of-memory answer without all its figures")
