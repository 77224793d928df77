"""The real command, without descriptors for a while: all is well again soon after."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.processes import tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_SOON = 60  # seconds, from when descriptors are back
_LASTING = (
    "triton-supervisor",
    "triton-watch",
    "housekeeping",
    "watcher",
    "eviction",
    "desired",
    "http-looks",
)


@contextmanager
def without_descriptors(adapter: RunningAdapter) -> Iterator[None]:
    """Nothing new can be opened; what is open stays. Without it a test would need thousands of
    connections, which the adapter bounds.
    """
    pid = adapter.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def tasks(client: Client) -> str:
    return client.get("/debug/tasks").body.decode()


def lacking(client: Client) -> list[str]:
    """Of the tasks that must not end."""
    seen = tasks(client)
    return [name for name in _LASTING if f"{name}:" not in seen]


def open_descriptors(adapter: RunningAdapter) -> int:
    return len(list(Path(f"/proc/{adapter.process.pid}/fd").iterdir()))


def is_well(client: Client) -> bool:
    with suppress(OSError):
        return client.get("/ping").status == 200
    return False


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_python_model(tmp_path / "m")


def test_triton_is_replaced_once_descriptors_are_back(
    model: Path,
) -> None:
    flags = (f"--model-roots={model.parent}", "--on-triton-restart=forget")
    with embedded_adapter(*flags, COMPLETE, descriptors=300) as adapter:
        client, admin = adapter.client(), Client(adapter.admin)
        with closing(client), closing(admin):
            assert client.load("m", model).status == 200
            assert lacking(admin) == []
            before = open_descriptors(adapter)
            with without_descriptors(adapter):
                os.kill(tritonserver(adapter), signal.SIGKILL)
                adapter.wait_for("triton.restart_failed")
                assert admin.get("/livez").status == 200
                tries = partial(adapter.events, "triton.restart_failed")
                wait_until(lambda: len(tries()) >= 3, _SOON, "several tries, which leave nothing")
                assert open_descriptors(adapter) <= before
            adapter.wait_for("triton.restarted")
            wait_until(lambda: is_well(client), _SOON, "the adapter is ready")
            assert lacking(admin) == []
            wait_until(lambda: client.load("m", model).status == 200, _SOON, "it loads again")
            assert client.post("/models/m/invoke", infer_body(1.0)).status == 200


def test_watching_and_measuring_go_on_after_descriptors_lacked(model: Path) -> None:
    with embedded_adapter(f"--model-roots={model.parent}", COMPLETE, descriptors=300) as adapter:
        client, admin = adapter.client(), Client(adapter.admin)
        with closing(client), closing(admin):
            assert client.load("m", model).status == 200
            assert client.post("/models/m/invoke", infer_body(1.0)).status == 200  # opens the way
            used = memory_used(admin)
            assert used is not None
            with without_descriptors(adapter):
                for _ in range(30):
                    assert client.post("/models/m/invoke", infer_body(1.0)).status == 200
                    time.sleep(0.1)
                seen = memory_used(admin)
                assert seen is None or seen > 0.9 * used, "a reading that saw too little"
            wait_until(lambda: lacking(admin) == [], _SOON, "all tasks go on")
            wait_until(lambda: memory_used(admin) is not None, _SOON, "memory is read")
            assert admin.get("/livez").status == 200


def memory_used(admin: Client) -> int | None:
    (device,) = admin.get("/debug/state").json()["memory"]["devices"].values()
    return device["used_bytes"]
