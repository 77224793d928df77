"""Cold calls of the endpoint, beside the same steps by hand, in turns.

By hand is `curl | igzip -d | tar -x`, then a load and a call of a Triton without an adapter. nginx
is the store of both: a web server, and for a folder one that lists as S3 does.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import tritonclient.grpc

from tests.benchmarks.figures import Json, compare, summarize, take_turns
from tests.benchmarks.place import MIB, FailedError, RunningTriton, Scale, find_program, run_triton
from tests.benchmarks.proxies import run_file_server
from tests.benchmarks.rows import COLD_MODELS, ColdModel
from tests.buckets import KEYS
from tests.running import COMPLETE, Client, Reply, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

_ROUNDS = 3
_QUICK_MIB = 16
_CALL_SECONDS = 600  # where others take the CPU, 2 GiB take minutes
_PIECE_BYTES = 16 * MIB
_COMPLETE = COMPLETE.partition("=")[2]  # Triton then starts one process a load
_READS = """
import os
with open(os.path.join(os.path.dirname(__file__), "weights.bin"), "rb") as file:
    while file.read(2**22):
        pass
"""


def measure_cold(scale: Scale) -> Json:
    """Measure the seconds from a call to its answer, and how much longer than by hand that is."""
    figures: Json = {}
    with (
        tempfile.TemporaryDirectory(prefix="benchmarks-") as folder,
        run_triton(argument=_COMPLETE) as triton,
    ):
        for model in COLD_MODELS:
            work = Path(folder) / model.name
            work.mkdir()
            size_mib = _QUICK_MIB if scale.is_quick else model.size_mib
            _make_package(work / "package", size_mib, packs_well=model.packs_well)
            _pack(work / "package", model)
            figures |= _measure_model(model, work, triton, 1 if scale.is_quick else _ROUNDS)
            shutil.rmtree(work)
    return figures


def _measure_model(model: ColdModel, work: Path, triton: RunningTriton, rounds: int) -> Json:
    with (
        run_file_server(work / "package", model.rate) as server,
        _run_endpoint(server.address, model, work / "fetched") as client,
    ):
        sides: dict[str, Callable[[], Json]] = {
            "adapter": partial(_call, client, model),
            "hand": partial(_do_by_hand, server.address, model, triton),
        }
        found = take_turns(sides, rounds, lambda measure: measure())
    return {
        f"{model.name}_call": summarize(found, "adapter", "seconds"),
        f"{model.name}_ratio": compare(found, "seconds", "adapter", "hand"),
    }


def _make_package(folder: Path, size_mib: int, *, packs_well: bool) -> None:
    write_python_model(folder, initialize=_READS)
    piece = os.urandom(_PIECE_BYTES)
    if packs_well:  # five bits of eight are random, as of quantized weights
        piece = (np.frombuffer(piece, np.uint8) & 31).tobytes()
    with (folder / "1" / "weights.bin").open("wb") as file:
        for number in range(size_mib * MIB // _PIECE_BYTES):
            file.write(piece if number % 2 else piece[::-1])


def _pack(folder: Path, model: ColdModel) -> None:
    """Put the archive of a package in its place, unless the model is served as a folder."""
    if model.is_folder:
        return
    archive = folder.with_name(f"packed{model.suffix}")
    deflate = f"| {find_program('igzip', 'isal')} -1 -c" if model.suffix.endswith("gz") else ""
    _run_pipe(f"tar -C '{folder}' -c . {deflate} > '{archive}'")
    shutil.rmtree(folder)
    folder.mkdir()
    archive.rename(folder / archive.name)


@contextmanager
def _run_endpoint(address: str, model: ColdModel, cache: Path) -> Iterator[Client]:
    store = "s3://models/" if model.is_folder else f"http://{address}/models/"
    flags = (
        f"--model-store={store}",
        f"--cache-dir={cache}",
        f"--model-wait-seconds={_CALL_SECONDS}",
        COMPLETE,
    )
    environ = {**KEYS, "AWS_ENDPOINT_URL_S3": f"http://{address}"}
    with (
        embedded_adapter(*flags, environ=environ) as adapter,
        closing(adapter.client(_CALL_SECONDS)) as client,
    ):
        yield client


def _make_key(model: ColdModel) -> str:
    """Return a key that nobody has called yet; the server drops its first part."""
    first = f"k{time.monotonic_ns()}"
    return first if model.is_folder else f"{first}/packed{model.suffix}"


def _call(client: Client, model: ColdModel) -> Json:
    """Return the seconds of a call whose model is in the store alone; unload the model."""
    key = _make_key(model)
    headers = {"X-Amzn-SageMaker-Target-Model": key}
    started_at = time.perf_counter()
    reply = _check(client.post("/endpoints/any/invocations", infer_body(0.5), headers))
    seconds = time.perf_counter() - started_at
    if reply.headers["X-Triton-Adapter-Cache"] != "miss":
        raise FailedError(f"a call of {key} found its model: {reply.headers}")
    _check(client.delete(f"/models/{key.replace('/', '%2F')}"))
    return {"seconds": seconds}


def _check(reply: Reply) -> Reply:
    if reply.status != 200:
        raise FailedError(f"{reply.status} {reply.body!r}")
    return reply


def _do_by_hand(address: str, model: ColdModel, triton: RunningTriton) -> Json:
    name = f"m{time.monotonic_ns()}"
    folder = triton.repository / name
    command = _write_command(f"http://{address}/models/{_make_key(model)}", model, folder)
    tensor = tritonclient.grpc.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([0.5], np.float32))
    folder.mkdir()
    started_at = time.perf_counter()
    _run_pipe(command)
    triton.client.load_model(name)
    triton.client.infer(name, [tensor])
    seconds = time.perf_counter() - started_at
    triton.client.unload_model(name)
    wait_until(lambda: not triton.client.is_model_ready(name), 60, "the model is unloaded")
    shutil.rmtree(folder)
    return {"seconds": seconds}


def _write_command(url: str, model: ColdModel, folder: Path) -> str:
    """Return the command that fetches a model into a folder."""
    curl = find_program("curl", "curl")
    if model.is_folder:
        files = ("config.pbtxt", "1/model.py", "1/weights.bin")
        targets = " ".join(f"{url}/{file} -o '{folder}/{file}'" for file in files)
        return f"{curl} -sf --no-progress-meter --parallel --create-dirs {targets}"
    inflate = f"| {find_program('igzip', 'isal')} -d -c" if model.suffix.endswith("gz") else ""
    return f"{curl} -sf {url} {inflate} | tar -x -C '{folder}'"


def _run_pipe(command: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
