"""`triton-adapter ps` of models that calls load from a store, here a web server that waits."""

import asyncio
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.journeys.client.terminal import run
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.store.web import Answer, Page, Serve, web_server
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

NAME = "team-a/m.tar.gz"


def half_until(go: asyncio.Event) -> Serve:
    """Send the first half, and the other one once that is set."""

    async def serve(answer: Answer):
        response = await answer.begin()
        half = len(answer.rest) // 2
        await response.write(answer.rest[:half])
        await go.wait()
        await response.write(answer.rest[half:])
        return response

    return serve


def packed(folder: Path) -> bytes:
    """With a file of 16 MiB that cannot be made smaller."""
    (write_python_model(folder) / "1" / "weights").write_bytes(os.urandom(16 * 2**20))
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w:gz") as tar:
        tar.add(folder, ".")
    return kept.getvalue()


async def test_ps_shows_the_progress_of_a_fetch(tmp_path):
    go = asyncio.Event()
    async with web_server() as server:
        server.pages[f"/{NAME}"] = Page(packed(tmp_path / "m"))
        server.script.append(half_until(go))
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(
            play, server.url, tmp_path / "cache", lambda: loop.call_soon_threadsafe(go.set)
        )


def play(store: str, cache: Path, send_the_rest: Callable[[], object]) -> None:
    flags = (f"--model-store={store}", f"--cache-dir={cache}", COMPLETE)
    with embedded_adapter(*flags) as adapter:
        environ = {"ADAPTER_ADMIN": adapter.admin}
        nothing = run("ps", NAME, environ=environ)
        assert (nothing.returncode, b"is loaded" in nothing.stderr) == (1, True)
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(invoke, adapter)
            try:
                is_coming = re.compile(r"PREPARING .*fetching.* (?:[1-4]\d|50) %")
                wait_until(
                    lambda: bool(is_coming.search(table(environ))), 30, "some of it is there"
                )
                told = run("ps", NAME, "--json", environ=environ)
                [model] = json.loads(told.stdout)["on_demand"]["models"]
                assert (model["model_id"], model["state"]) == (NAME, "PREPARING")
            finally:
                send_the_rest()
            assert calling.result() == 200
        assert "READY" in table(environ)


def invoke(adapter: RunningAdapter) -> int:
    with adapter.client() as client:
        return client.call_endpoint(NAME).status


def table(environ: dict[str, str]) -> str:
    """What `ps` says of the model; nothing before it is asked for."""
    told = run("ps", NAME, environ=environ)
    return told.stdout.decode()
