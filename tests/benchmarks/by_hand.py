"""Cold calls beside the same steps by hand: `curl | igzip -d | tar -x`, then a load and a call.

nginx of Debian is the store, once as fast as it can and once with a limit for each connection. The
load and the call by hand are those of the same adapter and Triton, so that the ratio is that of the
fetch and of what the adapter does around it.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from tests.benchmarks.figures import Json, spread, take_turns
from tests.benchmarks.place import MIB, FailedError, Scale, find_program
from tests.benchmarks.proxies import run_file_server
from tests.benchmarks.rows import HAND_ROWS
from tests.running import COMPLETE, Client, Reply, embedded_adapter
from tests.trees import infer_body, write_python_model

_ROUNDS = 3
_CALL_SECONDS = 600  # where others take the CPU, 2 GiB take minutes
_PIECE_BYTES = 16 * MIB
_READS = """
import os
with open(os.path.join(os.path.dirname(__file__), "weights.bin"), "rb") as file:
    while file.read(2**22):
        pass
"""


def measure_by_hand(scale: Scale) -> Json:
    """Measure the seconds of both ways, in turns, and how much longer the adapter takes."""
    figures: Json = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, ExitStack() as stack:
        files = Path(folder) / "files"
        files.mkdir()
        roots = Path(folder) / "by-hand"
        roots.mkdir()
        for name in HAND_ROWS if not scale.is_quick else list(HAND_ROWS)[:1]:
            archive, rate = HAND_ROWS[name]
            if not (files / archive).exists():
                _make_archive(files / archive, Path(folder) / "package")
            address = stack.enter_context(run_file_server(files, rate)).address
            with _run_endpoint(address, Path(folder), roots) as client:
                sides: dict[str, Callable[[], float]] = {
                    "adapter": partial(_call_cold, client, archive),
                    "hand": partial(_do_by_hand, client, address, archive, roots),
                }
                rounds = take_turns(
                    sides, 1 if scale.is_quick else _ROUNDS, lambda act: {"seconds": act()}
                )
            seconds = {side: [one["seconds"] for one in found] for side, found in rounds.items()}
            pairs = zip(seconds["adapter"], seconds["hand"], strict=True)
            figures[f"{name}_ratio"] = spread(adapter / hand for adapter, hand in pairs)
            figures[f"{name}_adapter"] = spread(seconds["adapter"])
            figures[f"{name}_hand"] = spread(seconds["hand"])
    return figures


@contextmanager
def _run_endpoint(address: str, folder: Path, roots: Path) -> Iterator[Client]:
    flags = (
        f"--model-store=http://{address}/",
        f"--cache-dir={folder / 'fetched'}",
        f"--model-roots={roots}",
        f"--model-wait-seconds={_CALL_SECONDS}",
        COMPLETE,
    )
    with embedded_adapter(*flags) as adapter, closing(adapter.client(_CALL_SECONDS)) as client:
        yield client
    shutil.rmtree(folder / "fetched")


def _make_archive(archive: Path, folder: Path) -> None:
    """Pack a model whose weights are as the name of the archive says: hard or soft to pack."""
    kind, size, _ = archive.name.split("-", 2)
    write_python_model(folder, initialize=_READS)
    piece = os.urandom(_PIECE_BYTES)
    if kind == "soft":  # five bits of eight are random
        piece = bytes(byte & 31 for byte in piece)
    with (folder / "1" / "weights.bin").open("wb") as file:
        for number in range(int(size) * MIB // _PIECE_BYTES):
            file.write(piece if number % 2 else piece[::-1])
    if archive.name.endswith(".gz"):
        packed = archive.open("wb")
        with packed:
            command = f"tar -C '{folder}' -cf - . | {find_program('igzip', 'isal')} -1 -c"
            subprocess.run(["bash", "-o", "pipefail", "-c", command], stdout=packed, check=True)
    else:
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, ".")
    shutil.rmtree(folder)


def _new_key(archive: str) -> str:
    """Return a key of the archive that nobody has called yet; nginx drops its first part."""
    return f"k{time.monotonic_ns()}/{archive}"


def _call_cold(client: Client, archive: str) -> float:
    key = _new_key(archive)
    headers = {"X-Amzn-SageMaker-Target-Model": key}
    started_at = time.perf_counter()
    _check(client.post("/endpoints/any/invocations", infer_body(0.5), headers))
    seconds = time.perf_counter() - started_at
    _check(client.delete(f"/models/{key.replace('/', '%2F')}"))
    return seconds


def _do_by_hand(client: Client, address: str, archive: str, roots: Path) -> float:
    name = f"m{time.monotonic_ns()}"
    folder = roots / name
    folder.mkdir()
    inflate = "| igzip -d -c" if archive.endswith(".gz") else ""
    url = f"http://{address}/{_new_key(archive)}"
    command = f"{find_program('curl', 'curl')} -sf {url} {inflate} | tar -x -C '{folder}'"
    started_at = time.perf_counter()
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
    _check(client.post("/models", {"model_name": name, "url": str(folder)}))
    _check(client.post(f"/models/{name}/invoke", infer_body(0.5)))
    seconds = time.perf_counter() - started_at
    _check(client.delete(f"/models/{name}"))
    shutil.rmtree(folder)
    return seconds


def _check(reply: Reply) -> Reply:
    if reply.status != 200:
        raise FailedError(f"{reply.status} {reply.body!r}")
    return reply
