"""A played world: the decisions on memory beside an oracle that knows all true sizes.

Thirty packages of 2 to 25 % of a device are called by a law of Zipf; about seven fit. A call of a
model that is not loaded loads it: 3 to 30 ticks, up to four loads side by side, after evictions of
the least recently used models, each of which takes 1 to 4 ticks. A tick stands for a second. A load
that takes the device beyond what it has fails, as by Triton's own out-of-memory, and is tried once
more. Every policy plays the same calls. Figures are MiB.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter.core.admission import (
    Answer,
    Decision,
    Evictable,
    MemoryRequest,
    Purpose,
    Reason,
    decide,
)
from adapter.core.ledger import DeviceBook, Ledger
from adapter.core.memory import HOST, Device
from adapter.core.mesh_books import MeshBooks
from adapter.core.model import ModelId, Package, TritonName
from adapter.core.sizes import SIZE_FACTOR, Need

MIB = 2**20
GPU = Device("gpu")
LIMIT = 24_000
TRITON = 500
HEADROOM = LIMIT // 20
PACKAGES = 30
SLOTS = 4
MESH_DEFAULT = LIMIT // 4  # the room that ModelMesh keeps free for loads
MESH_CAPACITY = LIMIT - HEADROOM - TRITON - MESH_DEFAULT
PATIENCE = {"explicit": 5, "endpoint": 55, "mesh": 30}  # ticks that the oracle's loads wait
IDLE_TICKS = 2  # a model with a call in these has requests


@dataclass(frozen=True)
class Variant:
    """The troubles of one world."""

    name: str
    low: float = 0.5  # guesses from the files lie between low and high times the truth
    high: float = 2.0
    is_declared: bool = False
    has_readings: bool = True
    has_libraries: bool = False  # 1 to 3 % stay after the first load of each of five kinds
    kept: float = 0.0  # share of an unloaded model that allocators keep for the next load
    has_neighbour: bool = False  # takes 20 % for a while, as soon as it is free
    grows: bool = False  # a loaded model grows by calls, up to a half
    lag: int = 0
    caller: str = "endpoint"  # explicit: unloads after a 507; mesh: evicts by its own books
    device: int = LIMIT  # size of the device; above LIMIT the limit is the adapter's own
    is_burst: bool = False  # the first tick calls all packages
    is_host: bool = False  # the kernel ends Triton where a GPU fails one load; packages are large
    knows_machine: bool = True  # the adapter is told what the machine has left

    @property
    def device_name(self) -> Device:
        """Return the device that all models are on."""
        return HOST if self.is_host else GPU


VARIANTS = (
    Variant("all declared", is_declared=True),
    Variant("guesses from 0.5 to 2"),
    Variant("guesses from 0.1 to 4", low=0.1, high=4),
    Variant("libraries stay", has_libraries=True),
    Variant("allocators keep 30 %", kept=0.3),
    Variant("a neighbour of 20 %", has_neighbour=True),
    Variant("models grow", grows=True),
    Variant("readings lag by 3", lag=3),
    Variant("no readings, declared", is_declared=True, has_readings=False),
    Variant("a limit of the adapter's own", low=0.1, high=4, device=LIMIT * 5 // 4),
    Variant("thirty first calls at once", low=0.1, high=4, is_burst=True),
    Variant("explicit caller, 0.5 to 2", caller="explicit"),
    Variant("explicit caller, 0.1 to 4", low=0.1, high=4, caller="explicit"),
    Variant("ModelMesh", caller="mesh"),
    Variant("ModelMesh, 0.1 to 4", low=0.1, high=4, caller="mesh"),
    Variant("all at once", low=0.1, high=4, has_libraries=True, kept=0.3, has_neighbour=True,
            grows=True, lag=3),
    Variant("host memory", is_declared=True, has_neighbour=True, is_host=True),
)  # fmt: skip


@dataclass
class Request:
    """A load that somebody waits for."""

    package: int
    arrived: int
    calls: list[int]
    started: int  # when its platform came with it the last time
    waits_since: int | None = None
    failures: int = 0
    evictions: int = 0
    unload: int | None = None  # the model whose unload the platform waits for


@dataclass
class Loaded:
    """A loaded model and its true size."""

    size: float
    used_at: int


@dataclass
class Loading:
    """A load in progress and what it will truly take."""

    target: float
    library: float
    began: int
    ticks: int
    shape: float
    request: Request
    taken: float = 0.0
    ended: int | None = None


@dataclass
class Unloading:
    """An unload in progress."""

    size: float
    began: int
    ticks: int
    kept: float
    ended: int | None = None

    def bytes_at(self, tick: int) -> float:
        """Return what is not given back yet."""
        return self.size * max(0.0, 1 - (tick - self.began) / self.ticks)


@dataclass
class Score:
    """Counts what callers met with."""

    calls: int = 0
    hits: int = 0  # calls of a loaded model
    evictions: int = 0
    refused: int = 0  # calls that got a 507 or a 400
    wrong: int = 0  # of these, the calls that the oracle would have admitted then and there
    oom: int = 0  # loads that Triton failed, or that passed a limit of the adapter's own
    beyond: int = 0  # MiB above the adapter's own limit, summed over ticks
    kills: int = 0  # Tritons that the kernel ended
    waited: int = 0
    loads: int = 0

    def add(self, other: "Score") -> None:
        """Add the counts of another world."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Oracle:
    """Knows all true sizes, also what loads in progress and the neighbour will take."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def decide(self, request: Request) -> Decision:
        """Decide as well as anybody can, as a world of this caller does."""
        caller = self.world.variant.caller
        may_wait = self.world.tick - request.waits_since < PATIENCE[caller]
        return self.judge(request.package, evicts=caller == "endpoint", may_wait=may_wait)

    def judge(self, package: int, *, evicts: bool, may_wait: bool) -> Decision:
        """Decide about a load of the package."""
        world = self.world
        need = world.target(package)
        is_mesh = world.variant.caller == "mesh"
        limit = LIMIT if is_mesh else LIMIT - HEADROOM
        soon = limit - world.promised()
        leaving = sum(unload.bytes_at(world.tick) for unload in world.unloading.values())
        if need <= soon - leaving:
            return _answer(Answer.ADMIT)
        if not world.loaded and not world.loading and not world.unloading:
            is_beyond = world.variant.is_host and need > world.available()
            return _answer(Answer.INSUFFICIENT if is_beyond else Answer.TRY)
        if need > soon and evicts:
            victims = []
            for victim in world.idle():
                if need > soon:
                    victims.append(victim)
                    soon += world.loaded[victim].size
            if victims and need <= soon:
                return _answer(Answer.EVICT, victims)
            if len(victims) < len(world.loaded):
                return _answer(Answer.WAIT if may_wait else Answer.INSUFFICIENT)
        is_moving = bool(world.loading or world.unloading)
        can_wait = may_wait and (need <= soon or is_moving or is_mesh)
        return _answer(Answer.WAIT if can_wait else Answer.INSUFFICIENT)

    def is_settled(self, name: int) -> bool:
        """Return whether the load has ended for as long as readings lag."""
        world = self.world
        lag = world.variant.lag if world.variant.has_readings else 0
        return world.tick - world.loading[name].ended >= lag

    def find_overrun(self) -> int | None:
        """End no load: the oracle admits none that goes too far."""
        return None

    def ignore(self, *_: object) -> bool:
        """Need no books."""
        return False

    read = use = queue = begin_load = end_load = settle = fail = ignore
    begin_unload = end_unload = refuse = exit = ignore


def _answer(answer: Answer, victims=()) -> Decision:
    need = Need("", {})
    return Decision(answer, Reason.FITS, need, victims=tuple(str(name) for name in victims))


class Books:
    """The modules of adapter.core, called as control will call them."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.device = world.variant.device_name
        self.ledger = Ledger({self.device: DeviceBook(LIMIT * MIB, HEADROOM * MIB)})
        self.mesh = MeshBooks()
        self.mesh.start(MESH_CAPACITY * MIB)
        self.needs: dict[int, Need] = {}  # as of the last decision
        self.packages = [self._inspect(number) for number in range(PACKAGES)]
        self.recent = list(range(PACKAGES))  # the least recently used package first

    def _inspect(self, number: int) -> Package:
        world = self.world
        declared = world.sizes[number] * MIB if world.variant.is_declared else None
        files = int(world.guesses[number] * MIB / SIZE_FACTOR)
        return Package("/models/m", (), files, declared, str(number))

    def decide(self, request: Request) -> Decision:
        """Ask admission about a load."""
        world = self.world
        caller = world.variant.caller
        guess_limit = MESH_DEFAULT * MIB if caller == "mesh" else None
        package = self.packages[request.package]
        need = self.ledger.need_of(package, guess_limit_bytes=guess_limit)
        self.needs[request.package] = need
        deadline = request.waits_since + PATIENCE[caller]
        if caller == "mesh":
            deadline += PATIENCE[caller]  # as long again for its turn, which the oracle needs not
        if caller == "endpoint":
            terms = MemoryRequest(
                Purpose.ON_DEMAND, request.arrived, deadline, candidates=self._candidates()
            )
        elif caller == "mesh":
            is_evicting = self.mesh.is_evicting
            terms = MemoryRequest(
                Purpose.PLANNED, request.arrived, deadline, is_mesh_evicting=is_evicting
            )
        else:
            terms = MemoryRequest(Purpose.EXPLICIT, request.started)
        return decide(self.ledger, need, terms, float(world.tick))

    def _candidates(self) -> tuple[Evictable, ...]:
        idle = set(self.world.idle())
        loaded = self.ledger.models
        return tuple(
            Evictable(TritonName(str(number)), number not in idle)
            for number in self.recent
            if str(number) in loaded
        )

    def read(self, used: float | None) -> None:
        """Take a reading, or note that none has come."""
        world = self.world
        if used is not None:
            is_told = world.variant.is_host and world.variant.knows_machine
            available = {HOST: int(world.available() * MIB)} if is_told else {}
            size = {self.device: round(used * MIB)}
            self.ledger.observe(size, world.tick, world.variant.lag, available)
        self.ledger.advance(world.tick)

    @property
    def ended_at(self) -> float:
        """Return the time of what has ended since the last tick: before the reading of this one."""
        return self.world.tick - 0.5

    def use(self, package: int) -> None:
        """Note a call of a loaded model."""
        self.recent.remove(package)
        self.recent.append(package)

    def queue(self, package: int) -> None:
        """Note that ModelMesh has queued a load."""
        self.mesh.count(ModelId(str(package)), 1)

    def begin_load(self, package: int) -> None:
        """Reserve what was asked for."""
        self.ledger.begin_load(TritonName(str(package)), self.needs[package])
        self.ledger.send_load(TritonName(str(package)))

    def end_load(self, package: int) -> None:
        """Note that Triton has loaded the model."""
        self.ledger.end_load(TritonName(str(package)), self.ended_at)

    def is_settled(self, package: int) -> bool:
        """Return whether the load can be booked."""
        return self.ledger.can_settle(TritonName(str(package)))

    def settle(self, package: int) -> bool:
        """Book a load; return whether it has to be undone."""
        settlement = self.ledger.settle(TritonName(str(package)))
        self.use(package)
        self.mesh.count(ModelId(str(package)), self.world.sizes[package] * MIB)
        return settlement.overrun is not None

    def find_overrun(self) -> int | None:
        """Return the load to end."""
        overrun = self.ledger.find_overrun(self.device)
        return None if overrun is None else int(overrun.name)

    def fail(self, package: int) -> None:
        """Release a load that ran out of memory."""
        self.ledger.fail_load(TritonName(str(package)), self.ended_at, is_memory=True)

    def begin_unload(self, package: int) -> None:
        """Expect memory back."""
        self.ledger.begin_unload(TritonName(str(package)))
        self.mesh.drop(ModelId(str(package)))

    def end_unload(self, package: int) -> None:
        """Note that Triton has unloaded the model."""
        self.ledger.end_unload(TritonName(str(package)), self.ended_at)

    def refuse(self, request: Request) -> None:
        """Note a refusal."""
        self.mesh.drop(ModelId(str(request.package)))
        if request.evictions and self.world.variant.caller == "endpoint":
            self.ledger.record_futile_eviction(str(request.package), self.world.tick)

    def exit(self) -> None:
        """Note that Triton has ended, and another one is up."""
        for name in list(self.ledger.loads):
            self.ledger.fail_load(name, self.ended_at, is_memory=False)
        self.ledger.start_life()


Policy = Callable[["World"], Oracle | Books]


@dataclass
class World:
    """One device, its callers and its troubles, tick by tick."""

    variant: Variant
    seed: int
    make_policy: Policy
    ticks: int = 4000
    tick: int = 0
    loaded: dict[int, Loaded] = field(default_factory=dict)
    loading: dict[int, Loading] = field(default_factory=dict)
    unloading: dict[int, Unloading] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    present_kinds: set[int] = field(default_factory=set)
    resident: float = 0.0  # libraries that stay
    pool: float = 0.0  # kept by allocators, for the next loads
    neighbour: float = 0.0
    neighbour_wants: float = 0.0
    readings: list[float] = field(default_factory=list)
    mesh: dict[int, int] = field(default_factory=dict)  # ModelMesh's own books
    score: Score = field(default_factory=Score)

    def __post_init__(self) -> None:
        variant = self.variant
        chance = random.Random(self.seed)
        smallest, largest = (0.1, 0.6) if variant.is_host else (0.02, 0.25)
        self.sizes = [int(LIMIT * chance.uniform(smallest, largest)) for _ in range(PACKAGES)]
        exponents = (math.log(variant.low), math.log(variant.high))
        self.guesses = [int(size * math.exp(chance.uniform(*exponents))) for size in self.sizes]
        self.kinds = [chance.randrange(5) for _ in range(PACKAGES)]
        self.libraries = [int(LIMIT * chance.uniform(0.01, 0.03)) for _ in range(5)]
        order = list(range(PACKAGES))
        chance.shuffle(order)
        weights = [(rank + 1) ** -1.1 for rank in range(PACKAGES)]
        self.calls: list[list[int]] = []
        for _ in range(self.ticks):
            is_called = chance.random() < 0.12
            ranks = chance.choices(range(PACKAGES), weights) if is_called else []
            self.calls.append([order[rank] for rank in ranks])
        if variant.is_burst:
            self.calls[0] = order[:]
        self.chance = random.Random(self.seed + 1)
        self.growth = random.Random(self.seed + 2)
        self.visits = random.Random(self.seed + 3)
        self.next_visit = self.visits.randint(300, 700)
        self.policy = self.make_policy(self)
        self.oracle = Oracle(self)

    # -- what is true ---------------------------------------------------------------------------

    def library_of(self, package: int) -> int:
        """Return what the first load of its kind takes beside the model, and leaves behind."""
        kind = self.kinds[package]
        is_needed = self.variant.has_libraries and kind not in self.present_kinds
        return self.libraries[kind] if is_needed else 0

    def target(self, package: int) -> int:
        """Return what a load takes."""
        return self.sizes[package] + self.library_of(package)

    def used(self) -> float:
        """Return what is in use."""
        models = sum(model.size for model in self.loaded.values())
        loads = sum(load.taken for load in self.loading.values())
        leaving = sum(unload.bytes_at(self.tick) for unload in self.unloading.values())
        return TRITON + self.resident + self.pool + self.neighbour + models + loads + leaving

    def available(self) -> float:
        """Return what the device has left."""
        return self.variant.device - self.used()

    def promised(self) -> float:
        """Return what will be used when the loads and unloads in progress have ended."""
        neighbour = max(self.neighbour, self.neighbour_wants)
        if self.variant.is_host:
            neighbour = self.neighbour
        models = sum(model.size for model in self.loaded.values())
        loads = sum(load.target for load in self.loading.values())
        return TRITON + self.resident + neighbour + models + loads

    def idle(self) -> list[int]:
        """Return the models without requests, the least recently used first."""
        names = [
            name for name, model in self.loaded.items() if self.tick - model.used_at > IDLE_TICKS
        ]
        return sorted(names, key=lambda name: self.loaded[name].used_at)

    # -- a tick ---------------------------------------------------------------------------------

    def play(self) -> Score:
        """Play all ticks."""
        for tick in range(self.ticks):
            self.tick = tick
            self._end_unloads_in_triton()
            self._advance_loads()
            self._move_neighbour()
            self._run_out_of_memory()
            self.readings.append(self.used())
            self.score.beyond += max(0, self.used() - LIMIT) if self.variant.device > LIMIT else 0
            self.policy.read(self._reading())
            self._end_overruns()
            self._finish()
            for package in self.calls[self.tick]:
                self._call(package)
            self._decide_all()
        return self.score

    def _reading(self) -> float | None:
        if not self.variant.has_readings:
            return None
        return self.readings[max(0, len(self.readings) - 1 - self.variant.lag)]

    def _end_unloads_in_triton(self) -> None:
        for unload in self.unloading.values():
            if unload.ended is None and self.tick - unload.began >= unload.ticks:
                unload.ended = self.tick
                self.pool += unload.kept

    def _advance_loads(self) -> None:
        for load in self.loading.values():
            if load.ended is None:
                share = min(1, (self.tick - load.began) / load.ticks) ** load.shape
                more = load.target * share - load.taken
                load.taken += more
                self.pool -= min(self.pool, more)

    def _move_neighbour(self) -> None:
        if not self.variant.has_neighbour:
            return
        if self.tick >= self.next_visit:
            is_leaving = self.neighbour_wants > 0
            share = 0.5 if self.variant.is_host else 0.2
            self.neighbour = 0
            self.neighbour_wants = 0 if is_leaving else LIMIT * share
            stay = self.visits.randint(300, 700) if is_leaving else self.visits.randint(200, 500)
            self.next_visit = self.tick + stay
        # On a host a neighbour that comes during a load or an unload can make the kernel end
        # Triton: no reading tells them apart. What is avoidable is played, so it comes between.
        is_quiet = not self.loading and not self.unloading
        if is_quiet or not self.variant.is_host:
            room = self.available() / 2
            self.neighbour += max(0, min(self.neighbour_wants - self.neighbour, room))

    def _run_out_of_memory(self) -> None:
        while self.used() > self.variant.device + 1:
            running = [name for name, load in self.loading.items() if load.ended is None]
            if not running:
                return
            if self.variant.is_host:
                self._kill_triton()
                return
            self._break_load(self.chance.choice(running))

    def _kill_triton(self) -> None:
        """End Triton, as the kernel does: with all that it had."""
        self.score.kills += 1
        requests = [load.request for load in self.loading.values() if load.ended is None]
        self.loaded.clear()
        self.loading.clear()
        self.unloading.clear()
        self.pool = 0.0
        self.policy.exit()
        for request in requests:
            self._try_again(request)

    def _break_load(self, name: int) -> None:
        load = self.loading.pop(name)
        if load.library:
            self.present_kinds.discard(self.kinds[name])
        self.policy.fail(name)
        self._try_again(load.request)

    def _end_overruns(self) -> None:
        """End loads that pass a limit of the adapter's own while they grow."""
        while (name := self.policy.find_overrun()) is not None:
            if self.loading[name].ended is not None:
                return  # its settlement says so again
            self._break_load(name)
            self.readings[-1] = self.used()
            self.policy.read(self._reading())

    def _finish(self) -> None:
        lag = self.variant.lag if self.variant.has_readings else 0
        for name, load in list(self.loading.items()):
            if load.ended is None and self.tick - load.began >= load.ticks:
                load.ended = self.tick
                self._answer(load.request)
                self.policy.end_load(name)
            if load.ended is not None and self.policy.is_settled(name):
                self._settle(name)
        for name, unload in list(self.unloading.items()):
            if unload.ended == self.tick:
                self.policy.end_unload(name)
            if unload.ended is not None and self.tick - unload.ended >= lag:
                del self.unloading[name]

    def _settle(self, name: int) -> None:
        load = self.loading.pop(name)
        self.resident += load.library
        self.loaded[name] = Loaded(self.sizes[name], self.tick)
        if self.policy.settle(name):
            self._begin_unload(name)
            self.score.evictions -= 1
            load.request.calls.append(self.tick)
            self._try_again(load.request)
        elif self.variant.caller == "mesh":
            self.mesh[name] = self.sizes[name]
            self._evict_for_mesh()

    # -- what callers do ------------------------------------------------------------------------

    def _call(self, name: int) -> None:
        self.score.calls += 1
        if name in self.loaded:
            self.score.hits += 1
            self._use(name)
            return
        load = self.loading.get(name)
        if load is not None:
            self.score.hits += load.ended is not None
            if load.ended is None:
                load.request.calls.append(self.tick)
            return
        for request in self.waiting:
            if request.package == name:
                request.calls.append(self.tick)
                return
        self.waiting.append(Request(name, self.tick, [self.tick], self.tick))
        if self.variant.caller == "mesh":
            self.mesh[name] = 1  # ModelMesh counts the default size when it queues a load
            self.policy.queue(name)
            self._evict_for_mesh()

    def _use(self, name: int) -> None:
        model = self.loaded[name]
        model.used_at = self.tick
        self.policy.use(name)
        more = 0.05 * self.sizes[name]
        grows = self.variant.grows and self.growth.random() < 0.1
        is_possible = self.used() + more <= LIMIT and model.size < 1.5 * self.sizes[name]
        if grows and is_possible:
            model.size += more

    def _answer(self, request: Request) -> None:
        self.score.waited += sum(self.tick - arrived for arrived in request.calls)
        request.calls = []

    def _refuse(self, request: Request) -> None:
        self.score.refused += len(request.calls)
        right = self.oracle.judge(request.package, evicts=True, may_wait=False)
        if right.answer in {Answer.ADMIT, Answer.TRY, Answer.EVICT}:
            self.score.wrong += len(request.calls)
        self.mesh.pop(request.package, None)
        self.policy.refuse(request)
        self._answer(request)

    def _try_again(self, request: Request) -> None:
        """Try a load that ran out of memory once more; a platform unloads a model before that."""
        self.score.oom += 1
        request.failures += 1
        request.waits_since = None
        if self.variant.caller == "explicit":
            self._unload_for_platform(request)
        elif request.failures == 1:
            self.waiting.insert(0, request)
        else:
            self._refuse(request)

    def _unload_for_platform(self, request: Request) -> None:
        idle = self.idle()
        request.evictions += 1
        if not idle or request.evictions > 12:
            self._refuse(request)
            return
        self._begin_unload(idle[0])
        request.unload = idle[0]
        request.waits_since = None
        request.started = self.tick
        self.waiting.append(request)

    def _evict_for_mesh(self) -> None:
        for name in self.idle():
            if sum(self.mesh.values()) > MESH_CAPACITY:
                self.mesh.pop(name, None)
                self._begin_unload(name)

    # -- what the adapter does ------------------------------------------------------------------

    def _begin_unload(self, name: int) -> None:
        model = self.loaded.pop(name)
        self.policy.begin_unload(name)
        kept = self.variant.kept * model.size
        self.unloading[name] = Unloading(model.size, self.tick, self.chance.randint(1, 4), kept)
        self.score.evictions += 1

    def _begin_load(self, request: Request) -> None:
        name = request.package
        library = self.library_of(name)
        if library:
            self.present_kinds.add(self.kinds[name])
        ticks = self.chance.randint(3, 30)
        shape = self.chance.choice((0.5, 1, 2))
        target = self.sizes[name] + library
        self.loading[name] = Loading(target, library, self.tick, ticks, shape, request)
        self.policy.begin_load(name)
        self.score.loads += 1

    def _decide_all(self) -> None:
        """Ask for each waiting load, in order of arrival. A small one may pass a large one."""
        for request in list(self.waiting):
            if sum(load.ended is None for load in self.loading.values()) >= SLOTS:
                return
            is_unloading = {request.package, request.unload} & self.unloading.keys()
            if request in self.waiting and not is_unloading:
                if request.unload is not None:
                    request.unload = None
                    request.started = self.tick
                self._decide_one(request)

    def _decide_one(self, request: Request) -> None:
        if request.waits_since is None or self.unloading:
            request.waits_since = self.tick
        decision = self.policy.decide(request)
        answer = decision.answer
        if answer in {Answer.ADMIT, Answer.TRY}:
            self.waiting.remove(request)
            self._begin_load(request)
        elif answer is Answer.EVICT:
            for victim in decision.victims:
                self._begin_unload(int(victim))
            request.evictions += len(decision.victims)
        elif answer is not Answer.WAIT:
            self.waiting.remove(request)
            if self.variant.caller == "explicit" and answer is Answer.INSUFFICIENT:
                self._unload_for_platform(request)
                return
            self._refuse(request)


def play(variant: Variant, policy: Policy, seeds: range, ticks: int = 4000) -> Score:
    """Return the score of a policy in several worlds of a variant."""
    score = Score()
    for seed in seeds:
        score.add(World(variant, 101 * seed, policy, ticks).play())
    return score
