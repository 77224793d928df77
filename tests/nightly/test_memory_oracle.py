"""Models that take and give back memory, and an oracle that knows what each of them truly holds.

What they hold are mappings whose sizes the oracle sets by request. Round after round some are
loaded, unloaded, asked to take or to give back, to fail or to die, several at a time; and one is
larger than all there is. The oracle plays the platform: where a load is refused it evicts and comes
again.

By what it is judged, all of it from the settings and the sizes of this run:

- A size that is known is off by no more than 10 % of it and 16 MiB (`tolerance`).
- A load is refused only if it does not leave the reserve free, and let in only if it does. It is
  the size of this one load that may be off; what the others take is given nothing. For the largest
  model that is less than the reserve: so nothing is let in that does not fit into the limit.
- A load of unknown size is refused, besides, where less than 64 MiB would be free for it.
- Amid a load no more than one load's size is used beyond the limit: that of the largest model that
  could fit. The giant is to be ended before it has taken so much.
- With no load under way nothing is used beyond the limit: a refusal comes when all is undone.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.journeys.memory.models import MIB, check_agreement, tree_bytes
from tests.processes import tritonserver
from tests.running import Reply, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_LIMIT, _RESERVE = 1500 * MIB, 75 * MIB
_SIZES = (40, 60, 90, 140, 220, 330, 420)
_GIANT, _GIANT_MIB = "giant", 4000
_LOOK_SECONDS = 0.3
_SEEN_SECONDS = 5.0  # the adapter looks every two seconds at what models with requests take
_UNKNOWN = 64 * MIB  # what the adapter wants to be free for a load of unknown size
_STAY, _DIE, _FAIL = -3.0, -2.0, -1.0

_IMPORTS = """
import mmap, os, time
def take(mebibytes):
    # private, anonymous, populated
    return mmap.mmap(-1, mebibytes * 2**20, 0x2 | 0x20 | 0x8000) if mebibytes else None
"""
_INITIALIZE = """
if os.path.exists({flag!r}):
    raise RuntimeError("told to fail")
self.held = []
for part in range({parts}):
    self.held.append(take({mebibytes} // {parts}))
    time.sleep({pause})
self.more = None
"""
_ANSWER = f"""
wish = float(values[0])
if wish == {_FAIL}:
    raise RuntimeError("told to fail")
if wish == {_DIE}:
    os._exit(1)
if wish != {_STAY}:
    if self.more is not None:
        self.more.close()
    self.more = take(int(wish))
"""


def tolerance(count: int) -> int:
    return count // 10 + 16 * MIB


@dataclass
class Truth:
    """What a model holds beyond its bare process, and what of that should be known: the most of
    this life, and of earlier ones the most, less a quarter of what each later life did not need.
    """

    package: Path
    flag: Path
    base: int
    more: int = 0
    is_loaded: bool = False
    most: int = 0
    believed: int = 0
    was_measured: bool = False

    @property
    def holds(self) -> int:
        return self.base + self.more if self.is_loaded else 0

    @property
    def claim(self) -> int:
        return max(self.most, self.believed) if self.is_loaded else 0

    @property
    def needs(self) -> int:
        return max(self.base, self.believed)

    def loaded(self) -> None:
        self.is_loaded, self.more, self.most = True, 0, self.base
        self.was_measured = True
        self.believed = max(self.believed, self.base)

    def unloaded(self) -> None:
        self.believed = max(self.believed, self.most)
        self.believed -= (self.believed - self.most) // 4
        self.is_loaded, self.more = False, 0


@dataclass
class Watcher:
    """Looks at what is used, all the time, in a thread of its own."""

    adapter: RunningAdapter
    one_load: int = 0
    faults: list[str] = field(default_factory=list)
    _begun: int = 0
    _ended_loads: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            ended_before = self._ended_loads
            excess = tree_bytes(self.adapter) - _LIMIT
            has_load = self._begun > ended_before  # at some time while it was looked
            if excess > (self.one_load if has_load else 0):
                when = "amid a load" if has_load else "with no load under way"
                self.faults.append(f"{excess / MIB:.0f} MiB too much {when}")

    @contextmanager
    def load(self) -> Iterator[None]:
        with self._turn:
            self._begun += 1
        try:
            yield
        finally:
            with self._turn:
                self._ended_loads += 1

    def end(self) -> None:
        self._ended.set()


class Oracle:
    def __init__(self, adapter: RunningAdapter, root: Path, rng: random.Random) -> None:
        self.adapter = adapter
        self.rng = rng
        self.models = {f"m{size}": _model(root, f"m{size}", size) for size in _SIZES}
        self.giant = _model(root, _GIANT, _GIANT_MIB, parts=40, pause=0.1)
        self.watcher = Watcher(adapter)
        self.pool = ThreadPoolExecutor(4)
        self.process = self.beside = self.beside_of = 0

    # -- what is known ----------------------------------------------------------------------

    @property
    def loaded(self) -> list[str]:
        return [name for name, truth in self.models.items() if truth.is_loaded]

    def look(self) -> None:
        """At a quiet moment: what Triton and so many models take beside what these hold."""
        self.beside_of = len(self.loaded)
        held = sum(truth.holds for truth in self.models.values())
        self.beside = tree_bytes(self.adapter) - held

    def beside_with(self, count: int) -> int:
        return self.beside + self.process * (count - self.beside_of)

    def held(self) -> int:
        """All that is used, as far as the oracle knows."""
        held = sum(truth.holds for truth in self.models.values())
        return self.beside_with(len(self.loaded)) + held

    def claimed(self, *others: str) -> int:
        """All that should be booked with these loaded too."""
        up = {*self.loaded, *others}
        claims = [max(self.models[name].claim, self.models[name].needs) for name in up]
        return self.beside_with(len(up)) + sum(claims)

    def check_sizes(self) -> None:
        for model in self.adapter.state()["models"]:
            truth = self.models[model["model_id"]]
            known, true = model["bytes"]["host"], truth.claim + self.process
            assert abs(known - true) <= tolerance(true), (model, truth)

    # -- what is done -----------------------------------------------------------------------

    def calibrate(self) -> None:
        """What Triton takes without models, and a model's bare process."""
        empty = tree_bytes(self.adapter)
        name = next(iter(self.models))
        assert self.load(name).status == 200
        self.process = tree_bytes(self.adapter) - empty - self.models[name].base
        assert 0 < self.process < 100 * MIB
        self.watcher.one_load = max(_SIZES) * MIB + self.process
        self.unload(name)

    def load(self, name: str) -> Reply:
        truth = self.giant if name == _GIANT else self.models[name]
        with closing(self.adapter.client(120)) as client, self.watcher.load():
            reply = client.load(name, truth.package)
        if reply.status == 200:
            truth.loaded()
        return reply

    def unload(self, name: str) -> None:
        with closing(self.adapter.client(120)) as client:
            assert client.delete(f"/models/{name}").status == 200
        self.models[name].unloaded()

    def ask(self, name: str, wish: float, *more: float) -> Reply:
        with closing(self.adapter.client(120)) as client:
            return client.post(f"/models/{name}/invoke", infer_body(wish, *more))

    def take(self, name: str, mebibytes: int) -> None:
        """At the rate at which the adapter looks, which is seen in what it knows."""
        truth = self.models[name]
        assert self.ask(name, mebibytes).status == 200
        truth.more = mebibytes * MIB
        truth.most = max(truth.most, truth.holds)
        wanted = truth.claim + self.process
        seen = time.monotonic() + _SEEN_SECONDS  # a peak that nobody sees is learned by nobody

        def is_known() -> bool:
            self.ask(name, _STAY)
            if time.monotonic() < seen:
                return False
            models = {m["model_id"]: m["bytes"] for m in self.adapter.state()["models"]}
            return abs(models[name]["host"] - wanted) <= tolerance(wanted)

        wait_until(is_known, 30, f"{name} is known to take {wanted / MIB:.0f} MiB")

    def play(self) -> None:
        rounds = [self.loads, self.loads, self.traffic, self.traffic, self.failures, self.too_large]
        self.look()
        self.rng.choice(rounds)()
        assert not self.watcher.faults, self.watcher.faults
        self.check_sizes()
        check_agreement(self.adapter)
        assert tree_bytes(self.adapter) <= _LIMIT

    def at_once(self, *works: Callable[[], object]) -> None:
        for done in [self.pool.submit(work) for work in works]:
            done.result()

    # -- the rounds -------------------------------------------------------------------------

    def loads(self) -> None:
        """Some loads and some unloads, while those that stay have requests."""
        away = [name for name in self.models if name not in self.loaded]
        coming = self.rng.sample(away, min(len(away), self.rng.randint(1, 2)))
        going = [name for name in self.loaded if self.rng.random() < 0.2][:1]
        staying = [name for name in self.loaded if name not in going]
        requests = [
            lambda name=name: self.ask(name, _STAY, *range(100_000)) for name in staying[:1]
        ]
        works = [lambda name=name: self.judge_load(name, coming, going) for name in coming]
        self.at_once(*works, *[lambda name=name: self.unload(name) for name in going], *requests)
        for name in coming:  # what is refused comes again, in place of others
            while not self.models[name].is_loaded and self.loaded and self.rng.random() < 0.7:
                self.unload(self.rng.choice(self.loaded))
                self.look()
                self.judge_load(name, [name], [])

    def judge_load(self, name: str, coming: list[str], going: list[str]) -> None:
        """Refused only if it may not have fitted, let in only if it may have fitted: with those
        that come and those that go beside it, or without.
        """
        others = [each for each in coming if each != name]
        was_known = self.models[name].was_measured
        size = self.models[name].needs + self.process
        at_most = self.claimed(*coming)
        at_least = self.claimed(name) - sum(
            max(self.models[each].claim, self.models[each].needs) + self.process for each in going
        )
        was_alone = not set(self.loaded) - set(going) and not others
        reply = self.load(name)
        if reply.status == 200:
            if was_known and not was_alone:
                beyond = at_least - (_LIMIT - _RESERVE)
                assert beyond <= tolerance(size), (name, at_least / MIB)
            return
        assert reply.status == 507, reply.body
        wanted = at_most if was_known else at_most + max(0, _UNKNOWN - size)
        short = _LIMIT - _RESERVE - wanted
        assert short < tolerance(size), (name, at_most / MIB, reply.body)

    def traffic(self) -> None:
        """Some take what there is room for, others give back and have large requests."""
        works = []
        room = (_LIMIT - _RESERVE - self.held()) // MIB - 20
        for name in self.loaded:
            truth = self.models[name]
            match self.rng.choice(["take", "give back", "ask", "nothing"]):
                case "take" if room > 20:
                    more = self.rng.randint(10, min(room, 200))
                    room -= more
                    wish = truth.more // MIB + more
                    works.append(lambda name=name, wish=wish: self.take(name, wish))
                case "give back":
                    wish = self.rng.randint(0, truth.more // MIB)
                    works.append(lambda name=name, wish=wish: self.take(name, wish))
                case "ask":
                    works.append(lambda n=name: self.ask(n, _STAY, *range(100_000)))
        self.at_once(*works)

    def failures(self) -> None:
        """A load that fails, a request that fails, and a model whose process ends."""
        away = [name for name in self.models if name not in self.loaded]
        if away:
            truth = self.models[name := self.rng.choice(away)]
            truth.flag.touch()
            reply = self.load(name)
            truth.flag.unlink()
            assert reply.status in {400, 507}, reply.body
        if self.loaded:
            assert self.ask(self.rng.choice(self.loaded), _FAIL).status == 500
        if self.loaded and self.rng.random() < 0.3:
            name = self.rng.choice(self.loaded)
            assert self.ask(name, _DIE).status in {500, 507}
            self.unload(name)

    def too_large(self) -> None:
        """What is larger than all there is never stays, and harms no other."""
        was_alone = not self.loaded
        reply = self.load(_GIANT)
        assert reply.status in {400, 507}, reply.body
        assert reply.status == 400 or not was_alone, reply.body
        assert reply.json()["code"] in {"ModelTooLarge", "InsufficientMemory"}
        for name in self.loaded:
            assert self.ask(name, self.models[name].more // MIB).status == 200


def _model(root: Path, name: str, mebibytes: int, parts: int = 1, pause: float = 0.0) -> Truth:
    flag = root / f"{name}.fails"
    package = write_python_model(
        root / name,
        imports=_IMPORTS,
        initialize=_INITIALIZE.format(
            flag=str(flag), mebibytes=mebibytes, parts=parts, pause=pause
        ),
        answer=_ANSWER,
    )
    return Truth(package, flag, mebibytes * MIB)


@contextmanager
def said_when_it_fails(adapter: RunningAdapter) -> Iterator[None]:
    """What the adapter said of late, and how it stands, is in the report."""
    try:
        yield
    except BaseException:
        for is_tritons in (False, True):
            told = [line for line in adapter.lines if (line["event"] == "triton.log") is is_tritons]
            print(*told[-30:], sep="\n")  # noqa: T201
        print(adapter.state(), tritonserver(adapter))  # noqa: T201
        raise


def test_what_is_believed_of_memory_is_true(seconds: float, seed: int, tmp_path: Path) -> None:
    flags = (
        "--memory-source=host",
        f"--memory-limit={_LIMIT}",
        f"--memory-reserve={_RESERVE}",
        f"--model-roots={tmp_path}",
    )
    with embedded_adapter(*flags) as adapter, said_when_it_fails(adapter):
        oracle = Oracle(adapter, tmp_path, random.Random(seed))
        looking = threading.Thread(target=oracle.watcher.run)
        looking.start()
        try:
            oracle.calibrate()
            end, rounds = time.monotonic() + seconds, 0
            while time.monotonic() < end or rounds < 10:
                oracle.play()
                rounds += 1
        finally:
            oracle.watcher.end()
            looking.join()
            oracle.pool.shutdown()
    assert not oracle.watcher.faults
