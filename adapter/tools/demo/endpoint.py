"""The demo's second half: a bucket, the adapter in front of it, and boto3 as the client."""

import importlib.util
import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from adapter.app import Adapter
from adapter.cli.options import examples_folder
from adapter.cli.text import DIM, coloured
from adapter.runtime.threads import Threads
from adapter.settings import load_settings
from adapter.tools.demo.output import check, say, title

LACKING = "moto and boto3 are not installed: in a clone pip install '.[demo]'"

_BUCKET, _PREFIX = "demo", "models/"
_MODELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen")
_SIZE = "200MiB"
_DEVICE, _ROOM = "800MiB", 3  # of each a process takes some 25 MiB more
_CALLS = Threads("calls", 1)  # boto3 waits for its answers
# What the bucket takes for credentials; it checks none.
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One answered call. `cache` is the answer's X-Triton-Adapter-Cache: hit, disk or miss."""

    values: list[float]
    cache: str
    seconds: float


def lacks_bucket() -> bool:
    return any(importlib.util.find_spec(name) is None for name in ("moto", "boto3"))


@contextmanager
def bucket(scratch: Path) -> Iterator[str]:
    """Serve a bucket on loopback, with an archive of each model; yield its address."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - not installed for anything else

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    before = {name: os.environ.get(name) for name in (*_CREDENTIALS, "AWS_ENDPOINT_URL_S3")}
    os.environ.update(_CREDENTIALS, AWS_ENDPOINT_URL_S3=address)
    try:
        _fill(address, scratch)
        yield address
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _fill(address: str, scratch: Path) -> None:
    import boto3  # noqa: PLC0415 - see above

    s3 = boto3.client("s3", endpoint_url=address)
    s3.create_bucket(Bucket=_BUCKET)
    source = examples_folder() / "hungry"
    config = (source / "config.pbtxt").read_text(encoding="utf-8")
    config = config.replace("700MiB", _SIZE).replace("2GiB", _DEVICE)
    changed = scratch / "config.pbtxt"
    changed.write_text(config, encoding="utf-8")
    archive = scratch / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(changed, "config.pbtxt")
        tar.add(source / "1", "1", filter=lambda each: None if "__pycache__" in each.name else each)
    for name in _MODELS:
        s3.upload_file(str(archive), _BUCKET, f"{_PREFIX}{name}.tar.gz")


def settings_of(scratch: Path) -> dict[str, object]:
    """Return the settings of this tour alone."""
    return {
        "model_store": f"s3://{_BUCKET}/{_PREFIX}",
        "cache_dir": str(scratch / "cache"),
        "memory_limit": _DEVICE,
        "eviction": "lru",  # by cost, models of one size go in an order that chance decides
        "min_residency_seconds": 0,
    }


class EndpointTour:
    def __init__(self, flags: Mapping[str, object], scratch: Path) -> None:
        self._flags = flags
        self._scratch = scratch
        self._adapter: Adapter | None = None
        self._client: Any = None
        self._base = ""

    async def run(self) -> None:
        try:
            await self._begin()
            await self._call_cold_and_hot()
            await self._evict()
            await self._come_back_from_disk()
            await self._find_the_cache_after_a_restart()
        finally:
            await self._end()

    async def _begin(self) -> None:
        room = f"{len(_MODELS)} models of {_SIZE} in a bucket, a device of {_DEVICE}"
        title(f"A multi-model endpoint: {room}")
        say("(the bucket is moto's, on this machine; the client is boto3, unchanged)")
        await self._start()

    async def _start(self) -> None:
        import boto3  # noqa: PLC0415 - see above

        begun = time.monotonic()
        loaded = load_settings({**self._flags, **settings_of(self._scratch)}, {}, None)
        self._adapter = Adapter(loaded)
        await self._adapter.start()
        self._base = f"http://{self._adapter.addresses['http']}"
        self._client = boto3.client("sagemaker-runtime", endpoint_url=self._base)
        check(is_met=True, text=f"the endpoint is up after {time.monotonic() - begun:.1f} s")

    async def _end(self) -> None:
        if self._adapter is not None:
            adapter, self._adapter = self._adapter, None
            await adapter.stop()

    async def _call_cold_and_hot(self) -> None:
        say('invoke_endpoint(EndpointName="any", TargetModel="ant.tar.gz", ...):')
        cold = await self._invoke("ant", cache="miss", note="fetched, unpacked, loaded, answered")
        hot = await self._invoke("ant", cache="hit", note="it is in memory")
        ratio = cold.seconds / hot.seconds
        say(f"the cold call took {ratio:,.0f} times as long as the hot one")

    async def _evict(self) -> None:
        title("Room for three: a fourth model, and the least recently used one goes")
        for name in ("bee", "cat"):
            await self._invoke(name, cache="miss")
        await self._invoke("ant", cache="hit", note="so bee is now the one used least recently")
        await self._invoke("dog", cache="miss")
        names = await self._resident()
        check("bee" not in names, f"in memory: {', '.join(names)}; bee was evicted")

    async def _come_back_from_disk(self) -> None:
        title("An evicted model is still on disk")
        await self._invoke("bee", cache="disk", note="no download; cat had to go")
        for name in _MODELS[4:]:
            await self._invoke(name, cache="miss")
        names = await self._resident()
        check(len(names) == _ROOM, f"in memory: {', '.join(names)}; all eight were answered")

    async def _find_the_cache_after_a_restart(self) -> None:
        title("The adapter is stopped and started again")
        await self._end()
        await self._start()
        await self._invoke("ant", cache="disk", note="the cache was found: no download")

    async def _resident(self) -> list[str]:
        url = f"{self._base}/models"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            listed = await response.json()
        return [model["modelName"].partition(".")[0] for model in listed["models"]]

    async def _invoke(self, name: str, *, cache: str, note: str = "") -> Call:
        call = await _CALLS.run(self._invoked, f"{name}.tar.gz")
        took = coloured(f"{call.seconds * 1000:8.1f} ms", DIM)
        text = f"{name:<4} {call.cache:<5} {took}  {note}"
        check(call.cache == cache and call.values == [1.0, 2.0], text.rstrip(), more=str(call))
        return call

    def _invoked(self, target: str) -> Call:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
        begun = time.monotonic()
        answer = self._client.invoke_endpoint(
            EndpointName="any",
            TargetModel=target,
            ContentType="application/json",
            Body=json.dumps({"inputs": [tensor]}),
        )
        body = json.loads(answer["Body"].read())
        seconds = time.monotonic() - begun
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        [output] = body["outputs"]
        return Call(output["data"], headers.get("x-triton-adapter-cache", ""), seconds)
