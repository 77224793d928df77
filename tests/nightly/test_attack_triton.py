"""Triton and its models die, hang, never return and lose their callers, for minutes, while others
go on: what is answered is right, and what is said to be gone is gone.
"""

import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.asking import triton_index
from tests.constants import HANG, TRITON_HANG, UNLOAD
from tests.processes import descendants, is_alive, stubs, tritonserver
from tests.running import Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_FACTORS = {"twice": 2.0, "thrice": 3.0, "slow": 5.0}
_CALLERS, _LEAVERS = 3, 2
# of the valid requests, outside of the outages that are made here
_LEAST_ANSWERED = 0.95
_LEAST_REQUESTS = 50
# each of these is over before an outage is
_OVER_SECONDS = 60


@dataclass
class Outages:
    """What the test itself breaks. A request counts where nothing was broken from before it began
    until after its answer.
    """

    _active: int = 0
    _changes: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._turn:
            self._active += by
            self._changes += 1

    def seen(self) -> tuple[bool, int]:
        with self._turn:
            return self._active > 0, self._changes


@dataclass
class Attack:
    adapter: RunningAdapter
    root: Path
    seed: int
    outages: Outages = field(default_factory=Outages)
    over: threading.Event = field(default_factory=threading.Event)
    valid: Counter[int] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def play(self, seconds: float) -> None:
        actors = [lambda n=n: self.call(n) for n in range(_CALLERS)]
        actors += [lambda n=n: self.leave(n) for n in range(_LEAVERS)]
        threads = [threading.Thread(target=self.guarded, args=[each]) for each in actors]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        self.guarded(lambda: self.break_things(end))
        self.over.set()
        for thread in threads:
            thread.join(2 * _OVER_SECONDS)

    def guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the test fails with it at its end
            self.wrong.append(repr(error))

    # -- who is served ----------------------------------------------------------------------

    def call(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        with closing(self.adapter.client(30)) as client:
            while not self.over.is_set():
                name = chance.choice([*_FACTORS])
                value = float(chance.randrange(1000))
                before = self.outages.seen()
                status = self.ask(client, name, value)
                if self.outages.seen() == before and not before[0]:
                    self.valid[status] += 1
                    if status != 200:
                        self.done[f"{name}: {status}"] += 1

    def ask(self, client: Client, name: str, value: float) -> int:
        try:
            reply = client.post(f"/models/{name}/invoke", infer_body(value))
        except (OSError, http.client.HTTPException):
            return 0
        if reply.status == 200:
            answer = reply.json()["outputs"][0]["data"]
            if answer != [value * _FACTORS[name]]:
                self.wrong.append(f"{name} of {value} is {answer}")
        return reply.status

    # -- who leaves what computes for ever --------------------------------------------------

    def leave(self, number: int) -> None:
        chance, name = random.Random(self.seed - 1 - number), f"endless{number}"
        with closing(self.adapter.client(60)) as client:
            while not self.over.is_set():
                with suppress(OSError, http.client.HTTPException, ValueError):
                    self.leave_once(client, name, chance)

    def leave_once(self, client: Client, name: str, chance: random.Random) -> None:
        if client.load(name, self.root / name).status not in {200, 409}:
            self.over.wait(0.5)  # an outage
            return
        family = {pid for stub in stubs(self.adapter, name) for pid in [stub, *descendants(stub)]}
        for _ in range(chance.randrange(1, 4)):
            self.hang_up(name, chance.choice([0.05, 0.5, 2.5]))
        family |= {pid for stub in stubs(self.adapter, name) for pid in [stub, *descendants(stub)]}
        status = client.delete(f"/models/{name}").status
        self.done[f"unloaded: {status}"] += 1
        if status == 200:
            left = [pid for pid in family if is_alive(pid)] + stubs(self.adapter, name)
            if left:
                self.wrong.append(f"{name} is unloaded, and {left} of {family} live")

    def hang_up(self, name: str, seconds: float) -> None:
        """A caller with so little time; the 504 of the adapter comes after 2 s."""
        connection = http.client.HTTPConnection(self.adapter.http, timeout=seconds)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("POST", f"/models/{name}/invoke", json.dumps(infer_body(1.0)))
            connection.getresponse().read()

    # -- who breaks things ------------------------------------------------------------------

    def break_things(self, end: float) -> None:
        chance = random.Random(self.seed)
        ways = [self.kill_stub, self.kill_triton, self.stop_triton]
        while time.monotonic() < end:
            for way in chance.sample(ways, len(ways)):
                self.over.wait(chance.uniform(4, 8))  # time to be served in
                with self.outages.one():
                    way(chance)
                    self.load_all()
                self.done[way.__name__] += 1
                if time.monotonic() > end:
                    break

    def kill_stub(self, chance: random.Random) -> None:
        for pid in stubs(self.adapter, chance.choice([*_FACTORS])):
            os.kill(pid, signal.SIGKILL)

    def kill_triton(self, _: random.Random) -> None:
        self.end_of_triton(signal.SIGKILL)

    def stop_triton(self, _: random.Random) -> None:
        """The adapter finds that it hangs, and ends it."""
        self.end_of_triton(signal.SIGSTOP)

    def end_of_triton(self, number: signal.Signals) -> None:
        before = len(self.adapter.events("triton.restarted"))
        os.kill(tritonserver(self.adapter), number)
        wait_until(
            lambda: len(self.adapter.events("triton.restarted")) > before,
            _OVER_SECONDS,
            f"Triton runs again after {number.name}",
        )

    def load_all(self) -> None:
        """Until all serve: a model whose process was killed looks well until it is called."""
        end = time.monotonic() + _OVER_SECONDS
        with closing(self.adapter.client(30)) as client:
            while left := [name for name in _FACTORS if not self.serves(client, name)]:
                assert time.monotonic() < end, f"{left} do not serve again"
                self.over.wait(0.1)

    def serves(self, client: Client, name: str) -> bool:
        with suppress(OSError, http.client.HTTPException):
            loaded = client.load(name, self.root / name).status in {200, 409}
            return loaded and self.ask(client, name, 1.0) == 200
        return False


def write_models(root: Path) -> None:
    for name, factor in _FACTORS.items():
        slowly = "import time\ntime.sleep(0.2)\n" if name == "slow" else ""
        write_python_model(root / name, answer=f"{slowly}values = values * {factor}")
    for number in range(_LEAVERS):
        # with a process of its own making, which does not end by itself either
        started = "self.child = subprocess.Popen(['sleep', '3600'])\n" if number else ""
        write_python_model(
            root / f"endless{number}",
            imports="import subprocess, time",
            initialize=started or "pass",
            answer="time.sleep(3600)",
        )


def test_what_dies_hangs_or_is_left_harms_nobody_else(
    tmp_path: Path, seconds: float, seed: int
) -> None:
    write_models(tmp_path)
    times = {UNLOAD: 16, HANG: 1, TRITON_HANG: 3}
    flags = (f"--model-roots={tmp_path}", "--infer-timeout-seconds=2")
    with embedded_adapter(*flags, constants=times) as adapter:
        attack = Attack(adapter, tmp_path, seed)
        attack.load_all()
        attack.play(seconds)
        story = f"seed {seed}: {dict(attack.done)}, answers {dict(attack.valid)}"
        sys.stderr.write(story + "\n")
        assert attack.wrong == [], story
        check_rest(adapter)
    requests = attack.valid.total()
    assert requests >= _LEAST_REQUESTS, story
    assert attack.valid[200] >= _LEAST_ANSWERED * requests, story
    assert attack.done["unloaded: 200"] >= 1, story


def check_rest(adapter: RunningAdapter) -> None:
    """All are unloaded: no process, no byte in the books and no request is left."""
    with closing(adapter.client(60)) as client:
        for model in adapter.state()["models"]:
            assert client.delete(f"/models/{model['model_id']}").status in {200, 404}
    state = adapter.state()
    assert state["models"] == []
    for book in state["memory"]["devices"].values():
        assert (book["used_by_models_bytes"], book["reserved_bytes"]) == (0, 0)
    assert not {"READY", "LOADING", "UNLOADING"} & set(triton_index(adapter).values())
    server = tritonserver(adapter)  # it leaves zombies of what was killed
    left = [pid for pid in descendants(server) if is_alive(pid)]
    assert left == []
