"""Daemons of a python model: processes that have lost their parent, most in a session of
their own. They end with their model, and with Triton and the adapter, however these end.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import children, is_alive, stubs, tritonserver
from tests.running import (
    COMPLETE,
    EMBEDDED,
    Client,
    RunningAdapter,
    embedded_adapter,
    running_adapter,
    unload_all,
    wait_until,
)
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_MIB = 2**20
_HELD_BYTES = 64 * _MIB
_IMPORTS = """
import os, pathlib, subprocess, time

def daemon(mark, *, session, command):
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    if session:
        os.setsid()
    parent = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)
    pathlib.Path(mark).write_text(str(os.getpid()))
    if command:
        os.execv(command[0], command)
    held = os.urandom(1) * {held}
    time.sleep(3600)
"""
_SLEEP = "['/bin/sleep', '3600']"
# what the model does when it is called
WAYS = {
    "in a session of its own": "daemon({mark!r}, session=True, command=[])",
    "executes another program": f"daemon({{mark!r}}, session=True, command={_SLEEP})",
    "executes in the session of Triton": f"daemon({{mark!r}}, session=False, command={_SLEEP})",
    "started by a shell": (
        "subprocess.run(['setsid', '-f', 'sh', '-c', 'echo $$ > {mark}; exec sleep 3600'])"
    ),
    "a child that stays": (
        "self.child = subprocess.Popen(['sh', '-c', 'echo $$ > {mark}; exec sleep 3600'])"
    ),
}


class Daemon:
    """A model that leaves a daemon behind at each call, and the last of them."""

    def __init__(self, folder: Path, way: str) -> None:
        self._mark = folder / "pid"
        held = _IMPORTS.replace("{held}", str(_HELD_BYTES))
        answer = WAYS[way].format(mark=str(self._mark))
        self.package = write_python_model(folder / "m", imports=held, answer=answer)

    def load(self, client: Client, name: str = "m") -> None:
        client.load_model(name, self.package)

    def start(self, client: Client, name: str = "m") -> int:
        """The pid of a new one."""
        self._mark.unlink(missing_ok=True)
        assert client.invoke(name).status == 200
        wait_until(lambda: self._mark.exists() and bool(self._mark.read_text()), 60, "it runs")
        pid = int(self._mark.read_text())
        assert is_alive(pid)
        return pid


@pytest.fixture(
    params=[
        "in a session of its own",
        "executes in the session of Triton",
        "started by a shell",
        "a child that stays",
    ]
)
def daemon(request, package) -> Daemon:
    return Daemon(package, request.param)


@pytest.fixture
def forked(package) -> Daemon:
    return Daemon(package, "in a session of its own")


@pytest.fixture
def executed(package) -> Daemon:
    return Daemon(package, "executes another program")


@pytest.fixture(scope="module")
def lasting(model_root) -> Iterator[RunningAdapter]:
    flags = (f"--model-roots={model_root}", "--memory-limit=4GiB", COMPLETE)
    with embedded_adapter(*flags) as adapter:
        yield adapter


@pytest.fixture
def adapter(lasting) -> Iterator[RunningAdapter]:
    """The same for all tests of this file; whatever the test loaded is unloaded after it."""
    yield lasting
    unload_all(lasting)


def test_daemon_is_ended_before_delete_answers(adapter, client, daemon):
    daemon.load(client)
    pids = [daemon.start(client), daemon.start(client)]
    before = len(adapter.events("model.processes_killed"))
    client.unload_model("m")
    assert not [pid for pid in pids if is_alive(pid)]
    wait_until(lambda: len(adapter.events("model.processes_killed")) > before, 60, "it is told")
    (killed,) = adapter.events("model.processes_killed")[before:]
    assert killed["processes"] == sorted(pids)


def test_daemon_survives_unload_of_another_model(client, forked):
    forked.load(client)
    forked.load(client, "other")
    first, second = forked.start(client), forked.start(client, "other")
    client.unload_model("other")
    assert not is_alive(second)
    assert is_alive(first)
    client.unload_model("m")
    assert not is_alive(first)


def test_unattributed_daemon_ends_with_last_possible_model(client, executed):
    executed.load(client)
    executed.load(client, "other")
    pid = executed.start(client, "other")
    client.unload_model("other")
    executed.load(client, "other")
    client.unload_model("m")
    assert not is_alive(pid)


def test_failed_loads_daemon_is_ended_before_the_answer(client, package):
    mark = package / "pid"
    way = WAYS["executes another program"].format(mark=str(mark))
    bad = write_python_model(
        package / "bad",
        imports=_IMPORTS.replace("{held}", "1"),
        initialize=f"{way}\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.01)\n1 / 0",
    )
    assert client.load("bad", bad).status == 400
    assert not is_alive(int(mark.read_text()))


def test_daemon_of_dead_model_is_ended(adapter, client, forked):
    forked.load(client)
    pid = forked.start(client)
    (stub,) = stubs(adapter, "m")[:1]
    os.kill(stub, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 60, "it is ended")

    def killed() -> list[int]:
        return [
            pid for line in adapter.events("model.processes_killed") for pid in line["processes"]
        ]

    wait_until(lambda: pid in killed(), 60, "it is told")


def test_daemon_copying_the_stub_is_no_stub(adapter, client, forked):
    forked.load(client)
    pid = forked.start(client)
    for stub in stubs(adapter, "m"):
        if stub != pid:
            os.kill(stub, signal.SIGKILL)
    assert client.invoke("m").status in {404, 500}
    assert client.invoke("m").status == 404
    client.load_model("m", forked.package)
    assert not is_alive(pid)


def test_daemons_memory_counts_until_it_ends(adapter, client, forked):
    forked.load(client)
    with Client(adapter.admin) as admin:

        def used() -> int:
            (device,) = admin.get("/debug/state").json()["memory"]["devices"].values()
            return device["used_bytes"] or 0

        before = used()
        forked.start(client)
        wait_until(lambda: used() > before + 0.9 * _HELD_BYTES, 60, "it counts")
        client.unload_model("m")
        assert used() < before + 0.5 * _HELD_BYTES


@pytest.mark.parametrize("daemon", ["executes in the session of Triton"], indirect=True)
def test_daemon_is_ended_before_the_next_triton(adapter, client, daemon):
    daemon.load(client)
    pid = daemon.start(client)
    before = len(adapter.events("triton.exited"))
    os.kill(tritonserver(adapter), signal.SIGKILL)
    wait_until(lambda: len(adapter.events("triton.exited")) > before, 60, "it is noticed")
    assert adapter.events("triton.exited")[-1]["reason"] == "was killed by SIGKILL"
    assert not is_alive(pid)
    wait_until(lambda: len(adapter.events("triton.restarted")) > before, 60, "it is back")


@pytest.mark.parametrize(
    ("daemon", "number"),
    [
        ("in a session of its own", signal.SIGKILL),
        ("executes in the session of Triton", signal.SIGTERM),
    ],
    indirect=["daemon"],
)
def test_a_daemon_ends_with_the_adapter(daemon, number):
    roots = f"--model-roots={daemon.package.parent}"
    with running_adapter(*EMBEDDED, COMPLETE, roots) as adapter:
        (keeper,) = children(adapter.process.pid)
        with adapter.client() as client:
            daemon.load(client)
            pid = daemon.start(client)
        adapter.stop(number)
        if number == signal.SIGTERM:
            assert not is_alive(pid)
        wait_until(lambda: not is_alive(pid) and not is_alive(keeper), 60, "nothing is left")
