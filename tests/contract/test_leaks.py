"""A real Triton whose backend leaks at each load is restarted in time, and callers only wait."""

import asyncio
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body

pytestmark = pytest.mark.triton

MIB = 2**20
LIMIT = 1536 * MIB
LOADS_A_ROUND = 5
CONFIG = """
backend: "{backend}"
input {{ name: "IN" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: 1 }}
instance_group {{ kind: KIND_CPU }}
parameters {{ key: "memory_bytes" value {{ string_value: "{memory}" }} }}
"""
PATHS = ("/models/echo/invoke", "/v2/models/echo/infer")
CALLS_A_SECOND = 50


def package(folder: Path, backend: str, kept_mib: int, memory: str) -> Path:
    """A model that brings its backend along."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.format(backend=backend, memory=memory))
    source, library = Path(__file__).with_name("leaky.c"), folder / f"libtriton_{backend}.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", f"-DKEPT_MIB={kept_mib}", "-o", library, source]
    subprocess.run(command, check=True)
    return folder


class Callers:
    """So many calls a second, whether those before them are answered or not. `seconds` are those
    of each call, `failed` what was answered else than 200.
    """

    def __init__(self, adapter: RunningAdapter) -> None:
        self.seconds: list[float] = []
        self.failed: list[tuple[int, str]] = []
        self._url = f"http://{adapter.http}"
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as session:
            begun = loop.time()
            while not self._stop.is_set():
                path = PATHS[len(tasks) % len(PATHS)]
                tasks.add(asyncio.ensure_future(self._call(session, path)))
                await asyncio.sleep(begun + len(tasks) / CALLS_A_SECOND - loop.time())
            await asyncio.gather(*tasks)

    async def _call(self, session: aiohttp.ClientSession, path: str) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with session.post(path, json=infer_body(1.0)) as reply:
            text = await reply.text()
        self.seconds.append(loop.time() - begun)
        if reply.status != 200:
            self.failed.append((reply.status, text))


def unaccounted(adapter: RunningAdapter) -> int:
    return adapter.state()["memory"]["devices"]["host"]["unaccounted_bytes"] or 0


def leak(client: Client, leaky: Path) -> None:
    for _ in range(LOADS_A_ROUND):
        reply = client.load("leaky", leaky)
        assert reply.status in {200, 400}, reply.body
        assert reply.status == 200 or b"it leaks, and fails" in reply.body
        if reply.status == 200:
            assert client.delete("/models/leaky").status == 200


def play(folder: Path, rounds: int) -> None:
    """Each round leaks, and then loads what does not fit beside that."""
    leaky = package(folder / "leaky", "leaky", 50, "50MiB")
    large = package(folder / "large", "quiet", 0, "1250MiB")
    flags = (f"--memory-limit={LIMIT}", "--recycle-unaccounted=0.2", f"--model-roots={folder}")
    with (
        embedded_adapter(COMPLETE, *flags, "--memory-recovery-seconds=0.2") as adapter,
        closing(adapter.client()) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.load("echo", EXAMPLES / "identity").status == 200
        callers = Callers(adapter)
        calling = pool.submit(callers.run)
        try:
            for at in range(rounds):
                leak(client, leaky)
                # another package each time: of what was loaded before the size is known
                another = shutil.copytree(large, folder / f"large{at}")
                (another / "1" / "weights").write_text(str(at))
                reply = client.load("large", another)
                assert reply.status == 200, reply.body
                assert len(adapter.events("triton.recycled")) == at + 1
                wait_until(lambda: unaccounted(adapter) < LIMIT / 100, 30, "nothing is lost")
                assert client.delete("/models/large").status == 200
        finally:
            callers.stop()
        calling.result(60)
    assert callers.failed == []
    longest, calls = max(callers.seconds), len(callers.seconds)
    sys.stdout.write(
        f"{rounds * LOADS_A_ROUND} loads, {rounds} restarts, {calls} calls,"
        f" the longest {longest:.2f} s\n"
    )


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_calls_wait_while_triton_gives_back_what_two_hundred_loads_have_leaked(tmp_path):
    play(tmp_path, rounds=40)
