"""A call of the endpoint whose model has to come first, beside its steps one by one."""

import http.client
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.benchmarks.figures import Json, ratios, spread
from tests.benchmarks.place import MIB, FailedError, Scale
from tests.benchmarks.rows import FIRST_ANSWERS
from tests.buckets import Bucket, s3_server
from tests.running import COMPLETE, Client, Reply, embedded_adapter
from tests.trees import infer_body, write_python_model

_ROUNDS = 6
_WEIGHTS = 16 * MIB
_ASKED = infer_body(0.5)
_READS = """
import os
with open(os.path.join(os.path.dirname(__file__), "weights.bin"), "rb") as file:
    self.weights = file.read()
"""


def cold(scale: Scale, folder: Path) -> Json:
    """A call that finds nothing, a call that finds the files on disk, and the same by hand: GET of
    the object and `tar`, a load at the same adapter, an inference.
    """
    rounds = 1 if scale.is_quick else _ROUNDS
    found: dict[str, list[float]] = {}
    count = rounds if scale.is_quick else rounds + 1  # the first ever is not looked at
    with _prepared(count, folder) as place:
        for number in range(count):
            for way in (_called, _by_hand)[:: -1 if number % 2 else 1]:
                for name, seconds in way(place, _key(number)).items():
                    found.setdefault(name, []).append(seconds)
    took = {name: times[-rounds:] for name, times in found.items()}
    fetch, load, infer = (took[name] for name in ("fetch", "load", "infer"))
    on_disk = [sum(each) for each in zip(load, infer, strict=True)]
    whole = [sum(each) for each in zip(fetch, on_disk, strict=True)]
    return {
        "miss_ratio": ratios(took["miss"], whole),
        "disk_ratio": ratios(took["disk"], on_disk),
        **{name: spread(times, 1e3) for name, times in took.items()},
    }


def first_answers(scale: Scale) -> Json:
    """Seconds from a call to its answer, by the size of the model and where it was."""
    rounds = 1 if scale.is_quick else 3
    found: dict[str, list[float]] = {}
    for size in FIRST_ANSWERS[: 1 if scale.is_quick else None]:
        with (
            tempfile.TemporaryDirectory(prefix="benchmarks-") as folder,
            _prepared(rounds, Path(folder), size * MIB) as place,
        ):
            for number in range(rounds):
                key = _key(number)
                took = {**_called(place, key, unload=False)}
                took["hit"] = called(place.client, key, "hit")
                _well(place.client.delete(f"/models/{key}"))
                for use, seconds in took.items():
                    found.setdefault(f"{use}_{size}", []).append(seconds)
    return {name: spread(times) for name, times in found.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    client: Client
    bucket: Bucket
    roots: Path


@contextmanager
def _prepared(count: int, folder: Path, weights: int = _WEIGHTS) -> Iterator[_Place]:
    """Start an adapter before a bucket with `count` archives of a model that reads `weights`
    bytes.
    """
    (roots := folder / "roots").mkdir()
    with ExitStack() as opened:
        bucket = Bucket(opened.enter_context(s3_server()), "models")
        archive = _archive(folder / "package", weights)
        bucket.put({_key(number): archive for number in range(count)})
        flags = (f"--model-store=s3://{bucket.name}/", f"--cache-dir={folder / 'fetched'}")
        adapter = opened.enter_context(
            embedded_adapter(*flags, f"--model-roots={roots}", COMPLETE, environ=bucket.environ)
        )
        yield _Place(opened.enter_context(closing(adapter.client())), bucket, roots)


def _key(number: int) -> str:
    return f"m{number}.tar.gz"


def _archive(folder: Path, weights: int) -> bytes:
    write_python_model(folder, initialize=_READS)
    with (folder / "1" / "weights.bin").open("wb") as file:
        for _ in range(weights // MIB):  # not to be compressed
            file.write(os.urandom(MIB))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, ".")
    return packed.getvalue()


def _called(place: _Place, key: str, *, unload: bool = True) -> Mapping[str, float]:
    """Return the seconds of a call that finds nothing, and of one that finds the files."""
    took = {}
    for use in ("miss", "disk"):
        took[use] = called(place.client, key, use)
        if unload or use == "miss":
            _well(place.client.delete(f"/models/{key}"))
    return took


def called(client: Client, key: str, use: str) -> float:
    """Seconds of a call of the endpoint, which must find its model as `use` says."""
    begun = time.perf_counter()
    headers = {"X-Amzn-SageMaker-Target-Model": key}
    reply = client.post("/endpoints/any/invocations", _ASKED, headers)
    seconds = time.perf_counter() - begun
    if _well(reply).headers["X-Triton-Adapter-Cache"] != use:
        raise FailedError(f"a call of {key} is no {use}: {reply.headers}")
    return seconds


def _by_hand(place: _Place, key: str) -> Mapping[str, float]:
    """Seconds of each step."""
    name = key.partition(".")[0]
    folder, packed = place.roots / name, place.roots / key
    folder.mkdir()
    times = [time.perf_counter()]
    _get(place.bucket, key, packed)
    subprocess.run(("tar", "-xzf", packed, "-C", folder), check=True)
    times.append(time.perf_counter())
    _well(place.client.load(name, folder))
    times.append(time.perf_counter())
    _well(place.client.post(f"/models/{name}/invoke", _ASKED))
    times.append(time.perf_counter())
    _well(place.client.delete(f"/models/{name}"))
    steps = zip(times[1:], times, strict=False)
    return dict(zip(("fetch", "load", "infer"), (b - a for b, a in steps), strict=True))


def _get(bucket: Bucket, key: str, into: Path) -> None:
    with closing(http.client.HTTPConnection(urlsplit(bucket.endpoint).netloc)) as connection:
        connection.request("GET", f"/{bucket.name}/{key}")
        reply = connection.getresponse()
        if reply.status != 200:
            raise FailedError(f"{key} in the bucket: {reply.status}")
        with into.open("wb") as file:
            shutil.copyfileobj(reply, file, MIB)


def _well(reply: Reply) -> Reply:
    if reply.status != 200:
        raise FailedError(f"{reply.status} {reply.body!r}")
    return reply
