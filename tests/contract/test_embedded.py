"""The embedded Triton, on a real one: it starts, is replaced when it dies, and leaves nothing."""

import asyncio
import logging
import os
import shutil
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tritonclient.grpc.aio import InferenceServerClient

from adapter.core.model import ModelId, TritonName
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import BackendUnavailable
from adapter.triton.client import TritonControl
from adapter.triton.server import launch
from adapter.triton.server.server import EmbeddedTriton
from tests.contract.controlled import until
from tests.trees import write_python_model

real = pytest.mark.triton


def new_triton(**changes) -> EmbeddedTriton:
    any_port = ("127.0.0.1", 0)
    settings = {
        "tritonserver": None,
        "repository": None,
        "http": any_port,
        "grpc": any_port,
        "metrics": any_port,
        "extra_args": (),
        "start_timeout_seconds": 100.0,
    }
    return EmbeddedTriton(**(settings | changes))


@asynccontextmanager
async def running(**changes):
    triton = new_triton(**changes)
    await triton.start()
    try:
        yield triton
    finally:
        await triton.stop()


async def load(triton: EmbeddedTriton, name: str) -> None:
    async with InferenceServerClient(triton.grpc_address) as client:
        await client.load_model(name)


async def is_ready(triton: EmbeddedTriton) -> bool:
    async with InferenceServerClient(triton.grpc_address) as client:
        return await client.is_server_ready()


@real
async def test_a_started_server_answers_at_the_chosen_addresses():
    async with running() as triton:
        assert await is_ready(triton)
        addresses = {triton.http_address, triton.grpc_address, triton.metrics_address}
        assert len(addresses) == 3
        for address in addresses:
            host, port = address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            await writer.wait_closed()
        assert [*triton.pids()] == [triton.pid]
        assert triton.repository.stat().st_mode & 0o777 == 0o755


@real
@pytest.mark.of_triton("2.51", "2.73", "the words of its command line")
async def test_bad_argument_fails_with_tritons_words():
    for bad, words in (
        ("--no-such=1", "unrecognized option '--no-such=1'"),
        ("--http-thread-count=abc", "Invalid option value. Got abc"),
        ("--load-model=absent", "failed to load all models"),
    ):
        triton = new_triton(extra_args=[bad])
        with pytest.raises(BackendUnavailable) as raised:
            await triton.start()
        assert words in str(raised.value)
        assert "exited with 1" in str(raised.value).splitlines()[0]
        assert len(str(raised.value).splitlines()) <= 21
        assert raised.value.delivered is False
        assert not triton.repository.parent.exists()


async def test_a_busy_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = other.getsockname()
        with pytest.raises(BackendUnavailable) as raised:
            await new_triton(grpc=(host, port)).start()
    assert str(raised.value) == (
        f"cannot listen at 127.0.0.1:{port}, Triton's grpc address: Address already in use;"
        " set another by --triton-grpc=127.0.0.1:PORT, where port 0 is any free one"
    )


@real
async def test_server_not_live_in_time_is_ended():
    triton = new_triton(start_timeout_seconds=0.001)
    with pytest.raises(BackendUnavailable, match=r"not live after 0\.001 s"):
        await triton.start()
    assert triton.pid is None
    assert not triton.repository.parent.exists()


@real
async def test_prints_are_logged_and_huge_lines_cut(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    chatty = r"print('huge ' + 'x' * 3_000_000 + '\nafter it', flush=True)"
    write_python_model(tmp_path / "chatty", initialize=chatty)
    async with running(repository=tmp_path) as triton:
        assert triton.repository == tmp_path
        await load(triton, "chatty")

        def records():
            return {record.line: record for record in caplog.records if hasattr(record, "line")}

        await until(lambda: "after it" in records())
        assert records()["after it"].levelname == "INFO"
        assert max(map(len, records())) == 8192
        assert {one.levelname for line, one in records().items() if line[0] == "I"} == {"INFO"}


async def test_a_missing_binary_is_named(tmp_path):
    with pytest.raises(BackendUnavailable, match=r"no tritonserver at .*/absent"):
        await new_triton(tritonserver=tmp_path / "absent").start()


@pytest.mark.parametrize(
    ("python", "numpy", "reason"),
    [
        ((3, 11), "1.26.4", None),
        ((3, 12), "1.26.4", None),
        ((3, 12), "2.1.0", "needs numpy 1.x, here is 2.1.0"),
        ((3, 11), None, "needs numpy 1.x, here is none"),
        ((3, 13), "2.1.0", "this is 3.13"),
    ],
)
def test_wheel_without_usable_python_backend_is_refused(python, numpy, reason):
    said = launch.explain_unfit(python, numpy)
    assert said is None if reason is None else reason in said


def test_binary_outside_the_wheel_runs_unchanged(tmp_path):
    prepared = launch.prepare(Path(sys.executable), tmp_path)
    assert prepared == launch.Launch(Path(sys.executable), (), {})
    assert list(tmp_path.iterdir()) == []


async def options_given(folder: Path, *, listed: str = "", **changes) -> list[str]:
    """Return the options with which a program in Triton's place is started, which ends at once.
    It lists one that it knows.
    """
    given, program = folder / "given", folder / "tritonserver"
    helps = f'[ "$1" = --help ] && echo "{listed}" && exit'
    program.write_text(f'#!/bin/sh\n{helps}\necho "$@" > {given}\n')
    program.chmod(0o755)
    with pytest.raises(BackendUnavailable):
        await new_triton(tritonserver=program, **changes).start()
    return given.read_text().split()


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("--http-max-input-size <integer>", {"--http-max-input-size=9"}), ("--id <string>", set())],
    ids=["newer", "2.51"],
)
async def test_newer_options_go_to_servers_that_list_them(tmp_path, listed, expected):
    newer = {"--http-max-input-size": "9", "--allow-client-shm": "true"}
    options = await options_given(tmp_path, listed=listed, newer_args=newer)
    assert {option for option in options if option.split("=")[0] in newer} == expected


TRACKER = "--backend-config=triton-backend-memory-tracker"


@pytest.mark.parametrize(
    ("has_gpus", "args", "expected"),
    [
        (True, (), [f"{TRACKER}=true"]),
        (False, (), []),
        (None, (), []),
        (True, (f"{TRACKER}=false",), [f"{TRACKER}=false"]),
    ],
)
async def test_memory_tracker_is_on_where_gpu_is(tmp_path, has_gpus, args, expected):
    async def answer():
        return has_gpus

    asks = None if has_gpus is None else answer
    options = await options_given(tmp_path, extra_args=args, has_gpus=asks)
    assert [option for option in options if option.startswith(TRACKER)] == expected


@real
async def test_server_without_memory_tracker_reports_nothing(tmp_path):
    async def has_gpus():
        return True

    write_python_model(tmp_path / "m")
    control = TritonControl(Faults(Classifier(())), load_timeout_seconds=60)
    async with running(repository=tmp_path, has_gpus=has_gpus) as triton:
        control.connect(triton.grpc_address)
        await control.load(TritonName("m"), ModelId("m"))
        assert await control.gpu_bytes(TritonName("m")) == {}
        await control.close()


def test_binary_without_executable_bit_is_copied(tmp_path):
    source = tmp_path / "source"
    source.write_text("#!/bin/sh\n")
    launch._place_executable(source, tmp_path / "copied")
    source.chmod(0o755)
    launch._place_executable(source, tmp_path / "linked")
    assert not (tmp_path / "copied").is_symlink()
    assert os.access(tmp_path / "copied", os.X_OK)
    assert (tmp_path / "linked").is_symlink()


def test_sweep_spares_living_and_foreign_folders():
    owned = launch.RunFolder()
    foreign = owned.path.with_name("triton-adapter-somebody")
    foreign.mkdir()
    try:
        launch.RunFolder.sweep()
        assert owned.path.exists()
        assert foreign.exists()
    finally:
        foreign.rmdir()
        owned.remove()
    assert not owned.path.exists()


def test_next_start_removes_leftovers(monkeypatch):
    owned = launch.RunFolder()
    (owned.path / "repository" / "t").mkdir(parents=True)
    with monkeypatch.context() as failing:
        failing.setattr(shutil, "rmtree", lambda *_, **__: None)  # as when somebody writes there
        owned.remove()
    assert owned.path.exists()
    launch.RunFolder.sweep()
    assert not owned.path.exists()
