"""The soak of the endpoint: everything that may happen to it, for minutes, and an oracle.

Callers with boto3 ask an adapter with a Triton of its own for more models than there is room for,
in memory and on disk. Meanwhile, drawn by the seed: models get new contents, earlier ones again, or
are deleted; the bucket meets faults or is away; Triton and the adapter are killed or restarted,
also while the bucket is away; hostile archives are uploaded. Some models die of each call.

Every answer is judged (endpoint_oracle.py, endpoint_callers.py). It must be of one version, and of
no older one than an answer before; in an outage it must be of the version that the store named
last. Each error must be a documented one that something explains. At the end each model must come
to its latest contents, and nothing may be left after all are unloaded.
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.asking import quoted
from tests.constants import HANG, STORE, UNLOAD
from tests.nightly.bad_bucket import BadBucket, Mood, bad_bucket
from tests.nightly.endpoint_callers import (
    ACCESS_KEY,
    MODEL_WAIT_SECONDS,
    SECRET,
    Caller,
    Tally,
)
from tests.nightly.endpoint_oracle import Oracle
from tests.nightly.endpoint_packages import (
    DYING,
    HOSTILE,
    MARK,
    MODEL_BYTES,
    dying_model,
    good_model,
    key_of,
)
from tests.ports import free_ports
from tests.processes import arguments, descendants, is_alive, tritonserver
from tests.running import COMPLETE, EMBEDDED, Client, RunningAdapter, wait_until

pytestmark = pytest.mark.triton

_MODELS = 20
_ROOM = 7  # models that fit into memory
_CALLERS = 8
_MIB = 2**20
_CACHE_LIMIT = 60 * _MIB
_TOKEN = "canary-2b9d41c07f"  # noqa: S105 - of this test alone
_GROWTH_BYTES = 24 * _MIB


class Soak:
    """A bucket, an adapter that may be replaced by another at the same port, and callers."""

    def __init__(self, bucket: BadBucket, place: Path, seed: int) -> None:
        self.bucket = bucket
        self.dice = random.Random(seed)
        self.oracle = Oracle()
        self.tally = Tally()
        self.count: Counter[str] = Counter()
        self.cache = place / "cache"
        self.regions: list[str] = []  # prefixes of the names in /dev/shm, one for each adapter
        self.processes: set[tuple[int, str]] = set()  # processes seen below the adapter
        self.is_over = threading.Event()
        self._scratch = place / "scratch"
        self._outside = place / MARK
        self._seed = seed
        self._mood_ends_at = 0.0
        [self._port] = free_ports(1)
        bucket.on_named = self.oracle.record_name
        self._fill()
        self.oracle.adapter_down.begin()
        self.adapter = self._start()
        self.oracle.adapter_down.end()
        self._caller = self.new_caller(99)

    def _fill(self) -> None:
        for number in range(_MODELS):
            self._put(number, 0)
        for key in DYING:
            self.bucket.put(key, dying_model(key, self._scratch))
        for name, make in HOSTILE.items():
            self.bucket.put(f"hostile/{name}", {f"hostile/{name}": make(self._outside)})

    def new_caller(self, number: int) -> Caller:
        """Return one more caller, with dice of its own."""
        return Caller(
            f"127.0.0.1:{self._port}",
            self._seed * 100 + number,
            models=_MODELS,
            oracle=self.oracle,
            bucket=self.bucket,
            tally=self.tally,
        )

    # -- the adapter ------------------------------------------------------------------------

    def _start(self) -> RunningAdapter:
        self.oracle.record_start()
        adapter = RunningAdapter(
            *EMBEDDED,
            COMPLETE,
            f"--http=127.0.0.1:{self._port}",
            f"--model-store={self.bucket.url}",
            f"--cache-dir={self.cache}",
            f"--cache-limit={_CACHE_LIMIT}",
            f"--endpoint-keys={ACCESS_KEY} env:SOAK_SECRET *",
            f"--memory-limit={_ROOM * MODEL_BYTES}",
            f"--model-wait-seconds={MODEL_WAIT_SECONDS}",
            "--memory-source=off",
            "--memory-reserve=0",
            "--revalidate-seconds=1",
            constants={STORE: 2, UNLOAD: 30, HANG: 3},
            environ={
                **self.bucket.environ,
                "SOAK_SECRET": SECRET,
                "ADAPTER_CONTROL_TOKEN": _TOKEN,
            },
        )
        adapter.wait_for("adapter.started")
        self.regions.append(adapter.repository.parent.name)
        return adapter

    def _restart(self, number: int) -> None:
        """Stop the adapter with a signal, and start another one."""
        adapter = self.adapter
        repository = adapter.repository
        self.processes |= find_processes(adapter)
        self.oracle.record_break()
        self.oracle.adapter_down.begin()
        code = adapter.stop(number)
        self.check_log(adapter)
        if number == signal.SIGTERM and code != 0:
            self.tally.object(f"the adapter exited with {code}: {adapter.errors}")
        self.adapter = self._start()
        self.oracle.adapter_down.end()
        wait_until(lambda: not repository.exists(), 30, "what the last run has left is removed")

    def check_log(self, adapter: RunningAdapter) -> None:
        """Object to tracebacks."""
        for line in list(adapter.lines):
            if "exception" in line or line.get("level") == "critical":
                self.tally.object(f"log: {line}")
        if "Traceback" in getattr(adapter, "errors", ""):
            self.tally.object(f"stderr: {adapter.errors}")

    # -- what is done to it -----------------------------------------------------------------

    def disturb(self) -> None:
        """Do one thing, drawn by its weight."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (30, self.renew_any),
            (20, self.roll_back_any),
            (4, self.delete_any),
            (8, self.begin_storm),
            (7, self.have_outage),
            (2, self.kill_triton),
            (1, self.kill_adapter),
            (1, self.restart_adapter),
            (12, self.upload_hostile),
        ]
        [act] = self.dice.choices([act for _, act in acts], [weight for weight, _ in acts])
        act()
        if self.bucket.mood is Mood.STORMY and time.monotonic() > self._mood_ends_at:
            self._end_storm()

    def _put(self, number: int, contents: int | None) -> None:
        key = key_of(number)
        objects = {} if contents is None else good_model(number, contents, self._scratch)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self.oracle.expect_put(key, contents)
        self.bucket.put(key, objects)

    def _draw_model(self) -> int:
        """Return one that is called often, mostly."""
        weights = [1 / (rank + 1) for rank in range(_MODELS)]
        [number] = self.dice.choices(range(_MODELS), weights)
        return number

    def renew_any(self) -> None:
        """Give a model contents that it never had."""
        self._renew(self._draw_model())

    def _renew(self, number: int) -> None:
        self._put(number, max(self.oracle.had(key_of(number))) + 1)
        self.count["updates"] += 1

    def roll_back_any(self) -> None:
        """Give a model contents that it had before."""
        self._roll_back(self._draw_model())

    def _roll_back(self, number: int) -> None:
        key = key_of(number)
        earlier = sorted(set(self.oracle.had(key)) - {self.oracle.latest(key)})
        if earlier:
            self._put(number, self.dice.choice(earlier[-3:]))
            self.count["rollbacks"] += 1

    def delete_any(self) -> None:
        """Delete a model, for a second or some."""
        number = self._draw_model()
        self._put(number, None)
        self.count["deletions"] += 1
        self.is_over.wait(self.dice.uniform(0.5, 4))
        self._renew(number)

    def begin_storm(self) -> None:
        """Let requests to the bucket meet faults for a while."""
        if self.bucket.mood is Mood.WELL:
            self.bucket.set_mood(Mood.STORMY)
            self.oracle.storms.begin()
            self.count["storms"] += 1
        self._mood_ends_at = time.monotonic() + self.dice.uniform(5, 20)

    def _end_storm(self) -> None:
        if self.bucket.mood is Mood.STORMY:
            self.bucket.set_mood(Mood.WELL)
            self.oracle.storms.end()

    def have_outage(self) -> None:
        """Change some models, have the store away, and mostly restart the adapter meanwhile."""
        self._end_storm()
        numbers = [self._draw_model() for _ in range(3)]
        for number in numbers:
            self.dice.choice([self._renew, self._roll_back])(number)
        for number in numbers:
            self._wait_for_latest(number)
        moods = [mood for mood in Mood if mood.is_away]
        self.bucket.set_mood(self.dice.choice(moods))
        self.oracle.record_break()
        self.oracle.outages.begin()
        self.count["outages"] += 1
        act = self.dice.choice([self.kill_adapter, self.restart_adapter, self.kill_triton, None])
        if act is not None:
            act()
            self.count[f"outages with {act.__name__}"] += 1
        if self.dice.random() < 0.5:
            self.renew_any()  # nobody can know of it
        served = [self._caller.call_model(number) for number in [*numbers, *range(5)]]
        self.count["served in an outage"] += sum(each is not None for each in served)
        self.is_over.wait(self.dice.uniform(1, 8))
        self.bucket.set_mood(Mood.WELL)
        self.oracle.outages.end()

    def _wait_for_latest(self, number: int, seconds: float = 10) -> bool:
        """Call the model until the latest contents answer."""
        end = time.monotonic() + seconds
        latest = self.oracle.latest(key_of(number))
        while self._caller.call_model(number) != latest:
            if time.monotonic() > end:
                return False
            self.is_over.wait(0.2)
        return True

    def kill_triton(self) -> None:
        """Kill it, and wait until it is back."""
        pid = tritonserver(self.adapter)
        before = len(self.adapter.events("triton.restarted"))
        self.oracle.triton_down.begin()
        os.kill(pid, signal.SIGKILL)
        self.count["kills of Triton"] += 1
        wait_until(
            lambda: len(self.adapter.events("triton.restarted")) > before, 90, "Triton is back"
        )
        self.oracle.triton_down.end()

    def kill_adapter(self) -> None:
        """Kill it, and start another one."""
        self.count["kills of the adapter"] += 1
        self._restart(signal.SIGKILL)

    def restart_adapter(self) -> None:
        """Stop it as an operator does, and start another one."""
        self.count["restarts of the adapter"] += 1
        self._restart(signal.SIGTERM)

    def upload_hostile(self) -> None:
        """Upload a hostile archive in a form that was not seen yet, and call it."""
        name = self.dice.choice(list(HOSTILE))
        content = HOSTILE[name](self._outside)
        key = f"hostile/{name}"
        self.bucket.put(key, {key: content + bytes(self.dice.randrange(1, 500))})
        self._caller.call_hostile(name)
        self.count["hostile archives"] += 1

    # -- the play ---------------------------------------------------------------------------

    def play(self, seconds: float) -> None:
        """Disturb callers for some seconds."""
        end = time.monotonic() + seconds
        with self.called():
            while time.monotonic() < end:
                self.disturb()
                self.check_limits()
                self.is_over.wait(self.dice.uniform(0.2, 1.5))
            self._end_storm()

    @contextmanager
    def called(self) -> Iterator[None]:
        """Have callers in threads of their own meanwhile."""
        is_over = threading.Event()
        callers = [self.new_caller(number) for number in range(_CALLERS)]
        threads = [threading.Thread(target=caller.run, args=(is_over,)) for caller in callers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a call is never answered"

    def check_limits(self) -> None:
        """Object to more in memory or on disk than there may be."""
        with suppress(OSError):
            state = self.adapter.state()
            disk = state["on_demand"]["disk"]
            if disk["bytes"] + disk["fetching_bytes"] > _CACHE_LIMIT:
                self.tally.object(f"the cache is over its limit: {disk}")
            for device, book in state["memory"]["devices"].items():
                if book["used_by_models_bytes"] + book["reserved_bytes"] > _ROOM * MODEL_BYTES:
                    self.tally.object(f"the ledger is over its limit: {device} {book}")

    def check_latest(self) -> None:
        """Object to models that do not answer with their latest contents soon."""
        for number in range(_MODELS):
            if not self._wait_for_latest(number, 60):
                self.tally.object(f"{key_of(number)} never comes to its latest contents")

    # -- the end ----------------------------------------------------------------------------

    def rest(self) -> "Rest":
        """Unload all, and return what is left."""
        adapter = self.adapter
        token = {"Authorization": f"Bearer {_TOKEN}"}
        with closing(Client(adapter.http, headers=token)) as client:

            def is_empty() -> bool:
                models = adapter.state()["models"]
                for model in models:
                    client.delete(f"/models/{quoted(model['model_id'])}")
                return not models

            wait_until(is_empty, 90, "all models are unloaded")
        self._wait_for_processes()
        books = adapter.state()["memory"]["devices"].values()
        assert [book["used_by_models_bytes"] + book["reserved_bytes"] for book in books] == [0]
        assert not [path for path in adapter.repository.iterdir() if path.is_dir()]
        assert not list((self.cache / "work").iterdir())
        self._check_cache()
        pid = adapter.process.pid
        return Rest(
            sockets=count_sockets(pid),
            regions=len(list(Path("/dev/shm").glob(f"{self.regions[-1]}*"))),
            adapter_bytes=anonymous_bytes(pid),
            triton_bytes=anonymous_bytes(tritonserver(adapter)),
        )

    def _wait_for_processes(self) -> None:
        """Wait until Triton and its keeper are the only processes of the adapter."""
        found: list[str] = []

        def are_two() -> bool:
            # Triton keeps the zombies of models that died
            pids = list(filter(is_alive, descendants(self.adapter.process.pid)))
            found[:] = [" ".join(arguments(pid)) for pid in pids]
            return len(pids) == 2

        try:
            wait_until(are_two, 30, "no process but Triton and its keeper")
        except AssertionError as error:
            raise AssertionError(f"processes are left: {found}") from error

    def _check_cache(self) -> None:
        files = [path for path in self.cache.rglob("*") if path.is_file()]
        assert sum(path.stat().st_blocks * 512 for path in files) <= _CACHE_LIMIT * 1.02
        for path in self.cache.rglob("*"):
            assert MARK not in path.name, path
            assert path.resolve().is_relative_to(self.cache.resolve()), path

    def _find_left(self) -> list[int]:
        """Return the processes of earlier adapters that go on."""
        return [pid for pid, start in self.processes if is_alive(pid) and start_of(pid) == start]

    def check_outside(self, place: Path) -> None:
        """Object to anything that a hostile archive has left."""
        assert {path.name for path in place.iterdir()} <= {"cache", "scratch"}
        assert not list(place.parent.glob(f"*{MARK}*"))
        assert not list(Path("/tmp").glob(f"*{MARK}*"))

    def stop(self) -> None:
        """Stop the adapter; check that nothing of any Triton is left."""
        self._caller.close()
        self.processes |= find_processes(self.adapter)
        code = self.adapter.stop()
        self.check_log(self.adapter)
        assert code == 0, self.adapter.errors
        assert not self.adapter.repository.exists()
        wait_until(lambda: not self._find_left(), 30, "no process is left")
        for region in self.regions:
            assert not list(Path("/dev/shm").glob(f"{region}*")), region


@dataclass
class Rest:
    """Counts what there is while nothing is loaded and nobody calls."""

    sockets: int
    regions: int
    adapter_bytes: int
    triton_bytes: int


def find_processes(adapter: RunningAdapter) -> set[tuple[int, str]]:
    """Return those below the adapter, each with its start: a pid may be another's later."""
    return {(pid, start_of(pid)) for pid in descendants(adapter.process.pid)}


def start_of(pid: int) -> str:
    """Return when a process was started, as the kernel counts; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def count_sockets(pid: int) -> int:
    """Return how many sockets the process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(link.readlink()))
    return sum(name.startswith("socket:") for name in found)


def anonymous_bytes(pid: int) -> int:
    """Return the memory of the process that no file backs."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def report(soak: Soak, seconds: float) -> None:
    """Print what was done, and the answers to callers."""
    tally = soak.tally
    waits = sorted(tally.waits)
    shares = {share: waits[int(share * (len(waits) - 1))] for share in (0.5, 0.9, 0.99, 1)}
    lines = [
        f"{tally.answers.total()} calls in {seconds:.0f} s: {dict(tally.answers.most_common())}",
        f"waits: {', '.join(f'p{100 * share:g} {wait:.2f} s' for share, wait in shares.items())}",
        f"done: {dict(soak.count)}",
        f"faults of the bucket: {dict(soak.bucket.faults)}",
        *(f"{count:6} {reason}" for reason, count in sorted(tally.reasons.items())),
        f"{len(tally.objections)} objections",
        *(f"  {text[:800]}" for text in tally.objections[:60]),
    ]
    sys.stdout.write("\n".join(["", *lines, ""]))


def check_second_rest(soak: Soak) -> None:
    """Unload all, call for a while without faults, unload all: nothing more is left."""
    first = soak.rest()
    with soak.called():
        soak.is_over.wait(20)
    second = soak.rest()
    sys.stdout.write(f"{first}\n{second}\n")
    assert second.sockets <= first.sockets + _CALLERS  # kept connections to Triton
    assert second.regions <= first.regions
    assert second.adapter_bytes <= first.adapter_bytes + _GROWTH_BYTES
    assert second.triton_bytes <= first.triton_bytes + _GROWTH_BYTES


def test_endpoint_answers_right_through_faults(seconds: float, seed: int, tmp_path: Path) -> None:
    """A tenth of the time is calm: then models come and go, and there is no error but busy."""
    with bad_bucket(seed) as bucket:
        soak = Soak(bucket, tmp_path, seed)
        try:
            with soak.called():
                soak.is_over.wait(seconds / 10)
            soak.play(seconds * 0.9)
            soak.check_latest()
            report(soak, seconds)
            check_second_rest(soak)
        finally:
            soak.stop()
    soak.check_outside(tmp_path)
    assert soak.tally.objections == []
    assert all(soak.tally.answers[f"200 {cache}"] for cache in ("hit", "disk", "miss"))
