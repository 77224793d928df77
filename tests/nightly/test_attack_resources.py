"""Callers and models that use up what all share, and small requests that must be answered
meanwhile: descriptors, the log on both sides, and threads.

The attacks take turns, in an order drawn from the seed, until the time is up. All the while an
oracle sends small requests whose answers it knows. Before that descriptors lack for minutes, while
Triton dies again and again.
"""

import io
import os
import random
import resource
import signal
import socket
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.constants import HANG
from tests.processes import tritonserver
from tests.running import Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_DESCRIPTORS = 400
_ATTACK_SECONDS = 8.0
_LACK_SECONDS = 150.0
_SOON = 10.0  # seconds until all is well behind an attack
# before a Triton is started that has died again and again within a minute of its start
_BACKOFF_SECONDS = 30.0
_SLOW = 2.0  # what SageMaker allows a probe
_LASTING = ("triton-supervisor", "triton-watch", "control-watch", "http-looks")
_PRINTS = """
import time
end = time.monotonic() + float(values[0])
while time.monotonic() < end:
    print({text!r}, end="", flush=True)
"""
_FILES = 4000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "oracle", answer="values = 2 * values")
    write_python_model(root / "short", answer=_PRINTS.format(text="x\n" * 5000))
    write_python_model(root / "long", answer=_PRINTS.format(text="y" * 100_000 + "\n"))
    with tarfile.open(root / "large.tar", "w") as archive:
        for number in range(_FILES):
            entry = tarfile.TarInfo(f"1/{number}")
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
    return root


class Oracle:
    """Asks one small thing again and again, on kept and on new connections."""

    def __init__(self, adapter: RunningAdapter) -> None:
        self._adapter = adapter
        self._is_over = threading.Event()
        self._excused = 0
        self.seen: Counter[str] = Counter()
        self.slowest = 0.0
        self._threads = [threading.Thread(target=self._ask, args=(kept,)) for kept in (True, False)]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Meanwhile there is no Triton, or its model is being loaded anew."""
        self._excused += 1
        try:
            yield
        finally:
            self._excused -= 1

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, is_kept: bool) -> None:
        client = self._adapter.client(timeout=20)
        number = 0.0
        while not self._is_over.is_set():
            number += 1
            is_excused = bool(self._excused)
            began = time.monotonic()
            verdict = self._verdict(client, number)
            if not is_excused and not self._excused:
                self.seen[verdict] += 1
                self.slowest = max(self.slowest, time.monotonic() - began)
            if not is_kept:
                client.close()
            time.sleep(0.02)
        client.close()

    def _verdict(self, client: Client, number: float) -> str:
        try:
            ping = client.get("/ping").status
            reply = client.post("/models/oracle/invoke", infer_body(number))
        except OSError as error:
            return type(error).__name__
        if (ping, reply.status) != (200, 200):
            return f"{ping}, {reply.status}"
        right = reply.json()["outputs"][0]["data"] == [2 * number]
        return "right" if right else "WRONG"


class Attacks:
    def __init__(self, adapter: RunningAdapter, root: Path, oracle: Oracle) -> None:
        self._adapter = adapter
        self._root = root
        self._oracle = oracle
        self._count = 0

    def all(self) -> list[Callable[[], None]]:
        return [
            self.connections,
            self.connections_and_a_dead_triton,
            self.no_descriptors,
            self.no_descriptors_and_a_dead_triton,
            self.chatty_models,
            self.standing_reader,
            self.archives,
        ]

    def connections(self) -> None:
        host, _, port = self._adapter.http.rpartition(":")
        firsts = (b"", b"POST /models/or", b"GET /ping HTTP/1.1\r\nHost: localhost\r\n")
        with ExitStack() as stack:
            end = time.monotonic() + _ATTACK_SECONDS
            while time.monotonic() < end:
                for number in range(100):
                    with suppress(OSError):
                        made = socket.create_connection((host, int(port)), 5)
                        stack.enter_context(made)
                        made.sendall(firsts[number % 3])
                time.sleep(0.2)
                if self._count_of(stack) > 2000:
                    stack.pop_all().close()

    def _count_of(self, stack: ExitStack) -> int:
        return len(stack._exit_callbacks)

    def connections_and_a_dead_triton(self) -> None:
        with self._oracle.excused():
            attack = threading.Thread(target=self.connections)
            attack.start()
            time.sleep(1)
            self.kill_triton()
            self.load_again()
            attack.join()

    def no_descriptors(self) -> None:
        """What the bound of connections keeps callers from, somebody else may bring about."""
        with self._oracle.excused(), self._squeezed():
            time.sleep(_ATTACK_SECONDS)

    def no_descriptors_and_a_dead_triton(self) -> None:
        with self._oracle.excused():
            with self._squeezed():
                self.kill_triton()
                time.sleep(_ATTACK_SECONDS)
            self.load_again()

    def chatty_models(self) -> None:
        with ExitStack() as stack:
            for name in ("short", "long"):
                client = stack.enter_context(closing(self._adapter.client()))
                client.load(name, self._root / name)
            threads = [
                threading.Thread(target=self._post, args=(f"/models/{name}/invoke",))
                for name in ("short", "long")
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _post(self, path: str) -> None:
        with closing(self._adapter.client()) as client, suppress(OSError):
            client.post(path, infer_body(_ATTACK_SECONDS))

    def standing_reader(self) -> None:
        """Whoever reads our log stands still, and callers fill it."""
        with self._adapter.unread(), closing(self._adapter.client()) as client:
            end = time.monotonic() + _ATTACK_SECONDS
            while time.monotonic() < end:
                with suppress(OSError):
                    client.post(f"/models/{'n' * 900}/invoke", b"{}", {"X-Request-Id": "r" * 1000})

    def archives(self) -> None:
        self._count += 1
        names = [f"large-{self._count}-{number}" for number in range(12)]

        def load(name: str) -> None:
            with closing(self._adapter.client(timeout=300)) as client, suppress(OSError):
                client.load(name, self._root / "large.tar")
                client.delete(f"/models/{name}")

        threads = [threading.Thread(target=load, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def kill_triton(self) -> None:
        with suppress(ValueError):  # it is being started
            os.kill(tritonserver(self._adapter), signal.SIGKILL)

    def load_again(self) -> None:
        """As a platform does once it is told that the model has gone."""
        with closing(self._adapter.client()) as client:

            def is_served() -> bool:
                with suppress(OSError):
                    if client.post("/models/oracle/invoke", infer_body(1.0)).status == 200:
                        return client.get("/ping").status == 200
                    client.load("oracle", self._root / "oracle")
                return False

            wait_until(
                is_served, _BACKOFF_SECONDS + 2 * _SOON, "Triton is back, and the model served"
            )

    @contextmanager
    def _squeezed(self) -> Iterator[None]:
        with squeezed(self._adapter):
            yield


@contextmanager
def squeezed(adapter: RunningAdapter) -> Iterator[None]:
    """It can open nothing new."""
    pid = adapter.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors(adapter: RunningAdapter) -> int:
    return len(list(Path(f"/proc/{adapter.process.pid}/fd").iterdir()))


def lack_seconds(seconds: float) -> float:
    """The share of the part's time in which descriptors lack."""
    return min(_LACK_SECONDS, seconds / 2)


def is_well(client: Client) -> bool:
    with suppress(OSError):
        return client.get("/ping").status == 200
    return False


def kill_when_started(adapter: RunningAdapter, last: int, draw: random.Random) -> int:
    """With descriptors for as long as it takes to start another Triton; that is killed, too, while
    it starts or soon after. Returns its pid.
    """
    found = last

    def is_started() -> bool:
        nonlocal found
        with suppress(ValueError):
            found = tritonserver(adapter)
        return found != last

    wait_until(is_started, 2 * _SOON, "another Triton is started")
    time.sleep(draw.choice([0, 0.1, 0.5, 2]))
    with suppress(ProcessLookupError):
        os.kill(found, signal.SIGKILL)
    return found


def test_all_is_well_soon_after_minutes_without_descriptors_in_which_triton_died(
    root: Path, seconds: float, seed: int
) -> None:
    draw = random.Random(seed)
    flags = (f"--model-roots={root}",)
    with (
        embedded_adapter(*flags, descriptors=_DESCRIPTORS, constants={HANG: 8}) as adapter,
        closing(adapter.client()) as client,
        closing(Client(adapter.admin)) as admin,
    ):
        assert client.load("oracle", root / "oracle").status == 200
        assert admin.get("/livez").status == 200
        before = open_descriptors(adapter)
        oracle = Oracle(adapter)
        try:
            with oracle.excused():
                lack(adapter, admin, lack_seconds(seconds), draw)
                check_well_soon(adapter, root)
        finally:
            oracle.end()
        wait_until(lambda: open_descriptors(adapter) <= before + 16, _SOON, "none is leaked")


def lack(adapter: RunningAdapter, admin: Client, seconds: float, draw: random.Random) -> None:
    """Descriptors come back twice meanwhile, for a moment, and Triton dies before they are gone."""
    server, rounds = tritonserver(adapter), 3
    for number in range(rounds):
        with squeezed(adapter):
            if number == 0:
                os.kill(server, signal.SIGKILL)
            end = time.monotonic() + seconds / rounds
            while time.monotonic() < end:
                assert admin.get("/livez").status == 200
                time.sleep(0.5)
        if number < rounds - 1:
            server = kill_when_started(adapter, server, draw)
    assert adapter.events("triton.restart_failed")


def check_well_soon(adapter: RunningAdapter, root: Path) -> None:
    """Descriptors are back."""
    end, done = time.monotonic() + _SOON, list[str]()
    with closing(Client(adapter.admin, 5)) as admin, closing(adapter.client(5)) as client:
        steps: list[tuple[str, Callable[[], bool]]] = [
            ("livez", lambda: admin.get("/livez").status == 200),
            ("readyz", lambda: admin.get("/readyz").status == 200),
            ("load", lambda: client.load("again", root / "oracle").status == 200),
            ("invoke", lambda: client.post("/models/again/invoke", infer_body(1.0)).status == 200),
            ("unload", lambda: client.delete("/models/again").status == 200),
        ]
        for name, step in steps:
            wait_until(lambda step=step: answers(step), end - time.monotonic(), f"{name}; {done}")
            done.append(f"{name} {_SOON - end + time.monotonic():.1f} s after")
        print(done)  # noqa: T201
        standing = admin.get("/debug/tasks").body.decode()
    assert [name for name in _LASTING if f"{name}:" not in standing] == []
    assert adapter.events("triton.restarted")


def answers(step: Callable[[], bool]) -> bool:
    with suppress(OSError):
        return step()
    return False


def test_small_requests_are_answered_whatever_others_use_up(
    root: Path, seconds: float, seed: int
) -> None:
    draw = random.Random(seed)
    flags = (f"--model-roots={root}",)
    with embedded_adapter(*flags, descriptors=_DESCRIPTORS, constants={HANG: 8}) as adapter:
        with closing(adapter.client()) as client:
            assert client.load("oracle", root / "oracle").status == 200
            assert client.load("short", root / "short").status == 200
            assert client.load("long", root / "long").status == 200
        oracle = Oracle(adapter)
        attacks = Attacks(adapter, root, oracle)
        try:
            play(attacks, draw, seconds - lack_seconds(seconds), oracle)
        finally:
            oracle.end()
        check_end(adapter, oracle)


def play(attacks: Attacks, draw: random.Random, seconds: float, oracle: Oracle) -> None:
    """Each attack once at least, if the time lets it."""
    end, order = time.monotonic() + seconds, []
    while time.monotonic() < end:
        order = order or draw.sample(attacks.all(), len(attacks.all()))
        attack = order.pop()
        before, began = oracle.seen.copy(), time.monotonic()
        attack()
        during = oracle.seen - before
        print(f"{attack.__name__}: {time.monotonic() - began:.1f} s, {dict(during)}")  # noqa: T201


def check_end(adapter: RunningAdapter, oracle: Oracle) -> None:
    print(f"in all {dict(oracle.seen)}, slowest {oracle.slowest:.2f} s")  # noqa: T201
    with closing(Client(adapter.admin)) as admin, closing(adapter.client()) as client:
        wait_until(lambda: is_well(client), _SOON, "the adapter is ready")
        assert admin.get("/livez").status == 200
        standing = admin.get("/debug/tasks").body.decode()
        assert [name for name in _LASTING if f"{name}:" not in standing] == []
    assert oracle.seen["WRONG"] == 0
    asked = oracle.seen.total()
    assert asked > 0
    assert oracle.seen["right"] >= 0.95 * asked, oracle.seen
    assert oracle.slowest < 2 * _SLOW, "a ping and an inference, each within what SageMaker allows"
