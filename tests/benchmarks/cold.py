"""Calls of the endpoint whose model is on disk, or in a bucket alone."""

import io
import os
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests.benchmarks.figures import Json, spread
from tests.benchmarks.place import MIB, FailedError, Scale
from tests.benchmarks.rows import MODEL_SIZES_MIB
from tests.buckets import Bucket, s3_server
from tests.running import COMPLETE, Client, Reply, embedded_adapter
from tests.trees import infer_body, write_python_model

_ROUNDS = 3
_READS = """
import os
with open(os.path.join(os.path.dirname(__file__), "weights.bin"), "rb") as file:
    self.weights = file.read()
"""


def measure_cold(scale: Scale) -> Json:
    """Measure the seconds from a call to its answer, by the size of the model and where it was."""
    rounds = 1 if scale.is_quick else _ROUNDS
    seconds: dict[str, list[float]] = {}
    for size in MODEL_SIZES_MIB[: 1 if scale.is_quick else None]:
        with (
            tempfile.TemporaryDirectory(prefix="benchmarks-") as folder,
            _run_endpoint(rounds, Path(folder), size * MIB) as client,
        ):
            for number in range(rounds):
                key = _key(number)
                for use in ("miss", "disk"):
                    seconds.setdefault(f"{use}_{size}", []).append(_call(client, key, use))
                    _check(client.delete(f"/models/{key}"))
    return {name: spread(values) for name, values in seconds.items()}


@contextmanager
def _run_endpoint(count: int, folder: Path, weights_bytes: int) -> Iterator[Client]:
    """Run an adapter in front of a bucket with `count` archives, each with so many weights."""
    with ExitStack() as stack:
        bucket = Bucket(stack.enter_context(s3_server()), "models")
        archive = _make_archive(folder / "package", weights_bytes)
        bucket.put({_key(number): archive for number in range(count)})
        flags = (f"--model-store=s3://{bucket.name}/", f"--cache-dir={folder / 'fetched'}")
        adapter = stack.enter_context(embedded_adapter(*flags, COMPLETE, environ=bucket.environ))
        yield stack.enter_context(closing(adapter.client()))


def _key(number: int) -> str:
    return f"m{number}.tar.gz"


def _make_archive(folder: Path, weights_bytes: int) -> bytes:
    write_python_model(folder, initialize=_READS)
    with (folder / "1" / "weights.bin").open("wb") as file:
        for _ in range(weights_bytes // MIB):
            file.write(os.urandom(MIB))  # random bytes cannot be compressed
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, ".")
    return packed.getvalue()


def _call(client: Client, key: str, use: str) -> float:
    """Return the seconds of a call, which must find its model as `use` says."""
    headers = {"X-Amzn-SageMaker-Target-Model": key}
    started_at = time.perf_counter()
    reply = client.post("/endpoints/any/invocations", infer_body(0.5), headers)
    seconds = time.perf_counter() - started_at
    if _check(reply).headers["X-Triton-Adapter-Cache"] != use:
        raise FailedError(f"a call of {key} is no {use}: {reply.headers}")
    return seconds


def _check(reply: Reply) -> Reply:
    if reply.status != 200:
        raise FailedError(f"{reply.status} {reply.body!r}")
    return reply
