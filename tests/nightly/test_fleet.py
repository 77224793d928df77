"""A fleet for as long as it is given: machines and Envoy come and go at random, models come and go
in the bucket, and callers ask by all ways that there are.

Each answer is checked: the model adds a number of its own and of its version. Each failure must
be one that what was done to the fleet just then explains; without that, none may be. Now and then
the callers rest, and whatever is held by what is over is looked for.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.asking import triton_index
from tests.buckets import Bucket, s3_server
from tests.fleet.envoy import RunningEnvoy, running_envoy
from tests.fleet.machines import MODEL_BYTES, Machine, machines, put_model, room_for
from tests.nightly.fleet_callers import NOBODY, WAYS, Answer, Ways
from tests.processes import arguments, descendants, is_alive, suspend, tritonserver
from tests.running import RunningAdapter, wait_until

pytestmark = pytest.mark.triton

_MACHINES, _AT_FIRST, _AT_LEAST = 4, 3, 2
_MODELS, _ROOM, _CALLERS = 24, 6, 8
_VERSION = 1000  # version n of model m adds n * _VERSION + m
# of the folders of 24 models: not all of them
_ON_DISK_BYTES = 20_000
_CACHE_BYTES = 12 * _ON_DISK_BYTES
_REVALIDATE_SECONDS = 3
_REST_EVERY_SECONDS = 40
# How long the adapter may believe that a key is not there, or still is.
_KNOWN_SECONDS = 10
_FLAGS = (
    *room_for(_ROOM),
    f"--cache-limit={_CACHE_BYTES}",
    f"--revalidate-seconds={_REVALIDATE_SECONDS}",
)
# What a call may be told while a part of the fleet that has it dies: by Envoy (503), by the adapter
# whose Triton is gone (424 at the endpoint; V2's own codes, which are those of a model that is not
# there when the next Triton was asked, who has none yet), or by nobody.
_DIED = {"503", "502", "UNAVAILABLE"}
_TRITON_DIED = {*_DIED, "424", "500", "INTERNAL", "404", "NOT_FOUND"}
_NOBODY = {*_DIED, NOBODY}
_ON_TRIAL, _TRIAL_SECONDS = "waits for its turn: it may have crashed Triton", 120.0
_ABSENT = {"400", "404", "NOT_FOUND"}
_SETTLED = {"ON_DISK", "READY"}
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
# How many files an adapter may have open at rest, beyond those of its models.
_MOST_FILES = 150


def name_of(model: int) -> str:
    return f"m{model}.tar.gz"


@dataclass
class Span:
    """A time in which some failures are explained; `end` is None while it lasts."""

    allowed: set[str]
    begin: float
    end: float | None = None

    def explains(self, begun: float, ended: float, told: str) -> bool:
        end = self.end if self.end is not None else ended
        return told in self.allowed and begun <= end and ended >= self.begin


@dataclass
class Shelf:
    """What the bucket has: which versions there were of each model, and when it was away."""

    bucket: Bucket
    folder: Path
    versions: Counter[int] = field(default_factory=Counter)
    away: dict[int, Span] = field(default_factory=dict)
    absences: dict[int, list[Span]] = field(default_factory=dict)

    def put(self, model: int) -> None:
        folder = self.folder / f"{model}-{self.versions[model]}"
        number = model + _VERSION * self.versions[model]
        put_model(self.bucket, folder, name_of(model), number=number)
        shutil.rmtree(folder)
        if (span := self.away.pop(model, None)) is not None:
            span.end = time.monotonic() + _KNOWN_SECONDS

    def renew(self, model: int) -> None:
        self.versions[model] += 1  # first: no answer may come before it is known
        self.put(model)

    def remove(self, model: int) -> None:
        span = self.away[model] = Span(_ABSENT, time.monotonic())
        self.absences.setdefault(model, []).append(span)
        self.bucket.delete(f"models/{name_of(model)}")

    def is_right(self, model: int, added: float) -> bool:
        version, number = divmod(added, _VERSION)
        return number == model and version <= self.versions[model]

    def explains(self, model: int, begun: float, ended: float, told: str) -> bool:
        return any(span.explains(begun, ended, told) for span in self.absences.get(model, []))


class Callers:
    """They ask until the play is over; `rest` has them wait."""

    def __init__(self, envoy: RunningEnvoy, shelf: Shelf, seed: int) -> None:
        self.told: Counter[str] = Counter()
        self.waits: list[float] = []
        self.wrong: list[str] = []
        self.failed: list[tuple[float, float, str, str]] = []
        self.spans: list[Span] = []
        self.triton_ends: list[float] = []
        self.favourite: int | None = None
        self._shelf = shelf
        self._may_ask, self._is_over = threading.Event(), threading.Event()
        self._may_ask.set()
        self._turn = threading.Condition()
        self._asking = 0
        self._threads = [
            threading.Thread(target=self._ask_on, args=(envoy, random.Random(f"{seed}-{number}")))
            for number in range(_CALLERS)
        ]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def end(self) -> None:
        self._is_over.set()
        self._may_ask.set()
        for each in self._threads:
            each.join(120)
        assert not any(each.is_alive() for each in self._threads), "a call is never answered"

    @contextmanager
    def resting(self) -> Iterator[None]:
        self._may_ask.clear()
        with self._turn:
            assert self._turn.wait_for(lambda: not self._asking, 120), "a call is never answered"
        try:
            yield
        finally:
            self._may_ask.set()

    @contextmanager
    def spared(self, allowed: set[str]) -> Iterator[None]:
        """Calls that are under way meanwhile may fail so."""
        span = Span(allowed, time.monotonic())
        self.spans.append(span)
        try:
            yield
        finally:
            span.end = time.monotonic()

    def _ask_on(self, envoy: RunningEnvoy, dice: random.Random) -> None:
        weights = [1 / (rank + 1) for rank in range(_MODELS)]
        with closing(Ways(envoy)) as by:
            while not self._is_over.is_set():
                self._may_ask.wait()
                [model] = dice.choices(range(_MODELS), weights)
                if (hot := self.favourite) is not None and dice.random() < 0.8:
                    model = hot
                way, value = dice.choice(WAYS), float(dice.randrange(1000))
                with self._turn:
                    self._asking += 1
                begun = time.monotonic()
                answer = by.ask(way, name_of(model), value)
                self._note(model, way, value, begun, answer)
                if answer.told == NOBODY:
                    time.sleep(0.2)
                with self._turn:
                    self._asking -= 1
                    self._turn.notify_all()

    def _note(self, model: int, way: str, value: float, begun: float, answer: Answer) -> None:
        ended = time.monotonic()
        call = f"{way} of {name_of(model)}, begun at {begun:.2f}, ended at {ended:.2f}"
        with self._turn:
            self.told[answer.told] += 1
            self.waits.append(ended - begun)
            if answer.added is None:
                if not self._shelf.explains(model, begun, ended, answer.told):
                    self.failed.append((begun, ended, answer.told, f"{call}: {answer.text}"))
            elif not self._shelf.is_right(model, answer.added - value):
                self.wrong.append(f"{call}: {answer.added - value:g} was added")

    def unexplained(self) -> list[str]:
        """What failed though nothing was done to the fleet that would explain it."""
        return [
            f"{told}: {text}"
            for begun, ended, told, text in self.failed
            if not any(span.explains(begun, ended, told) for span in self.spans)
            and not (_ON_TRIAL in text and self._has_suspects(begun))
        ]

    def _has_suspects(self, begun: float) -> bool:
        """Return whether models may be on trial: a Triton has ended twice within a minute."""
        return sum(begun - _TRIAL_SECONDS < at < begun for at in self.triton_ends) > 1


class Play:
    """The fleet, and what is done to it."""

    def __init__(
        self, fleet: list[Machine], envoy: RunningEnvoy, callers: Callers, shelf: Shelf, seed: int
    ) -> None:
        self.fleet = fleet
        self.envoy = envoy
        self.callers = callers
        self.shelf = shelf
        self.dice = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.runs: set[Path] = set()
        self.note_runs()

    @property
    def up(self) -> list[Machine]:
        return [each for each in self.fleet if each.is_up]

    def note_runs(self) -> None:
        """The private folders of adapters, by whose names their shared memory is called, too."""
        self.runs |= {adapter_of(each).repository.parent for each in self.up}

    def disturb(self) -> None:
        act = self.dice.choice(ACTS)
        say(f"{time.monotonic():.2f} {act.__name__[1:]}")
        if act(self):
            self.done[act.__name__[1:]] += 1
            self.envoy.wait_for(*self.up)
            self.note_runs()

    def _start(self) -> bool:
        down = [each for each in self.fleet if not each.is_up]
        if down:
            self.dice.choice(down).start()
        return bool(down)

    def _one_that_may_go(self) -> Machine | None:
        return self.dice.choice(self.up) if len(self.up) > _AT_LEAST else None

    def _stop(self) -> bool:
        """It drains: no call may fail."""
        if (machine := self._one_that_may_go()) is None:
            return False
        below = descendants(adapter_of(machine).process.pid)
        machine.stop()
        assert [pid for pid in below if is_alive(pid)] == [], "processes outlive their machine"
        return True

    def _kill(self) -> bool:
        """What is in flight on it is lost, and nothing else."""
        if (machine := self._one_that_may_go()) is None:
            return False
        with self.callers.spared(_DIED):
            machine.kill()
        return True

    def _freeze(self) -> bool:
        """It does nothing for some seconds: calls that it has wait, and none fails."""
        pid = adapter_of(self.dice.choice(self.up)).process.pid
        suspend(pid)
        try:
            time.sleep(self.dice.uniform(0.5, 9))
        finally:
            os.kill(pid, signal.SIGCONT)
        return True

    def _kill_triton(self) -> bool:
        machine = self.dice.choice(self.up)
        adapter = adapter_of(machine)
        before = len(adapter.events("triton.restarted"))
        self.callers.triton_ends.append(time.monotonic())
        with self.callers.spared(_TRITON_DIED):
            os.kill(tritonserver(adapter), signal.SIGKILL)
            wait_until(lambda: len(adapter.events("triton.restarted")) > before, 90, "it is back")
            wait_until(machine.is_ready, 60, "it is ready")
        return True

    def _end_envoy(self) -> bool:
        with self.callers.spared(_NOBODY):
            if self.dice.random() < 0.5:
                self.envoy.process.kill()
            self.envoy.stop()
            self.envoy.start()
            self.envoy.wait_for(*self.up)
        return True

    def _renew(self) -> bool:
        self.shelf.renew(self.dice.randrange(_MODELS))
        return True

    def _remove(self) -> bool:
        if len(self.shelf.away) < _MODELS // 8:
            self.shelf.remove(self.dice.choice(sorted({*range(_MODELS)} - {*self.shelf.away})))
        return True

    def _bring_back(self) -> bool:
        if self.shelf.away:
            self.shelf.renew(self.dice.choice(sorted(self.shelf.away)))
        return True

    def _favour(self) -> bool:
        """One model is asked for much more than all others, for a few seconds."""
        self.callers.favourite = self.dice.randrange(_MODELS)
        time.sleep(self.dice.uniform(1, 5))
        self.callers.favourite = None
        return True

    def check_rest(self) -> None:
        """Nobody asks: what is held is what is loaded, on each machine and in Envoy."""
        for machine in self.up:
            end = time.monotonic() + 60
            while under_way := unsettled(machine):
                assert time.monotonic() < end, f"{machine.name} does not rest: {under_way}"
                time.sleep(0.1)
            check_machine(machine)
        wait_until(self._is_envoy_at_rest, 20, "Envoy has no request")

    def _is_envoy_at_rest(self) -> bool:
        """Of its own requests there is this one."""
        stats = self.envoy.stats("_rq_active$|_cx_active$|rq_pending_active$")
        assert stats["http.fleet.downstream_cx_active"] <= 2 * _CALLERS, stats
        return not any(n for name, n in stats.items() if "_rq_" in name and "admin" not in name)

    def check_all_models(self) -> None:
        """With everything in its place again each model answers, in its newest version."""
        for model in sorted(self.shelf.away):
            self.shelf.renew(model)
        with closing(Ways(self.envoy)) as by:
            for model in range(_MODELS):
                newest = model + _VERSION * self.shelf.versions[model]
                for way in WAYS:
                    wait_until(
                        lambda m=model, n=newest, w=way: by.ask(w, name_of(m), 0.0).added == n,  # type: ignore[misc]
                        60,
                        f"{way} of {name_of(model)} adds {newest}",
                    )


Act = Callable[[Play], bool]
ACTS: tuple[Act, ...] = (
    *(4 * [Play._start]),
    *(2 * [Play._stop]),
    *(2 * [Play._kill]),
    *(2 * [Play._freeze]),
    Play._kill_triton,
    Play._end_envoy,
    *(4 * [Play._renew]),
    *(2 * [Play._remove]),
    *(2 * [Play._bring_back]),
    Play._favour,
)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def adapter_of(machine: Machine) -> RunningAdapter:
    assert machine.adapter is not None
    return machine.adapter


def unsettled(machine: Machine) -> list[object]:
    """What is under way on it: requests, fetches, loads and unloads."""
    state = machine.state()
    return [
        *(m for m in state["models"] if m["state"] != "READY" or m["in_flight"]),
        *(m for m in state["on_demand"]["models"] if m["state"] not in _SETTLED),
    ]


def check_machine(machine: Machine) -> None:
    """Ledger, Triton, processes, disk and descriptors agree on what is loaded."""
    adapter = adapter_of(machine)
    state = machine.state()
    loaded = state["models"]
    assert len(loaded) <= _ROOM
    assert all(sum(each["bytes"].values()) == MODEL_BYTES for each in loaded)
    in_triton = [name for name, state in triton_index(adapter).items() if state == "READY"]
    assert len(in_triton) == len(loaded)
    below = [arguments(pid) for pid in descendants(adapter.process.pid)]
    stubs = [each for each in below if each and "triton_python_backend_stub" in each[0]]
    assert len(stubs) == len(loaded), stubs
    files = [path for path in machine.cache.rglob("*") if path.is_file()]
    assert not [path for path in files if "part" in path.name], "a download was left"
    assert sum(path.stat().st_blocks * 512 for path in files) <= _CACHE_BYTES + 2 * _ON_DISK_BYTES
    open_files = len(list(Path(f"/proc/{adapter.process.pid}/fd").iterdir()))
    assert open_files <= _MOST_FILES, f"{machine.name} has {open_files} files open"


def report(play: Play, seconds: float) -> None:
    told, waits = play.callers.told, sorted(play.callers.waits)
    say(f"\n{sum(told.values())} calls in {seconds:.0f} s: {dict(told.most_common())}")
    say(f"done to the fleet: {dict(play.done.most_common())}")
    say(", ".join(f"p{100 * q:g} {waits[int(q * (len(waits) - 1))]:.3f} s" for q in _QUANTILES))


def test_every_answer_is_right_and_every_failure_has_its_cause_while_parts_come_and_go(
    seconds: float, seed: int, tmp_path: Path
) -> None:
    with s3_server() as endpoint:
        shelf = Shelf(Bucket(endpoint, "fleet"), tmp_path / "drafts")
        for model in range(_MODELS):
            shelf.put(model)
        with (
            machines(_MACHINES, shelf.bucket, tmp_path, *_FLAGS, started=_AT_FIRST) as fleet,
            running_envoy(fleet) as envoy,
        ):
            callers = Callers(envoy, shelf, seed)
            play = Play(fleet, envoy, callers, shelf, seed)
            callers.start()
            try:
                storm(play, seconds)
            finally:
                callers.end()
                report(play, seconds)
            for machine in fleet:
                if not machine.is_up:
                    machine.start()  # which removes what its last run has left
            envoy.wait_for(*fleet)
            play.note_runs()
            play.check_all_models()
            play.check_rest()
        check_nothing_is_left(play)
    assert callers.wrong == []
    assert callers.unexplained() == []


def storm(play: Play, seconds: float) -> None:
    end = time.monotonic() + seconds
    rest = time.monotonic() + _REST_EVERY_SECONDS
    while time.monotonic() < end:
        play.disturb()
        assert play.callers.wrong == []
        assert play.callers.unexplained() == []
        if time.monotonic() > rest:
            with play.callers.resting():
                play.check_rest()
            rest = time.monotonic() + _REST_EVERY_SECONDS
        time.sleep(play.dice.uniform(0, 2))


def check_nothing_is_left(play: Play) -> None:
    """All machines have ended: their private folders and shared memory went with them."""
    assert [run for run in play.runs if run.exists()] == []
    regions = [each.name for each in Path("/dev/shm").iterdir()]
    assert [name for name in regions if name.startswith(tuple(r.name for r in play.runs))] == []
