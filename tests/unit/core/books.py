"""Plays sequences on a ledger with figures in MiB that a reader can check by head.

The clock goes on by a second at each reading. Where a sequence does not say otherwise, loads and
unloads have ended half a second before the last reading, which shows that.
"""

import math

from adapter.core.admission import (
    Answer,
    Decision,
    Evictable,
    MemoryRequest,
    Purpose,
    decide,
    decide_place,
)
from adapter.core.ledger import DeviceBook, Ledger, Settlement
from adapter.core.memory import HOST, Device
from adapter.core.model import Package, TritonName
from adapter.core.sizes import Basis, Need

MIB = 2**20
GPU = "gpu"


def to_bytes(figures):
    """Return a size in bytes of one in MiB."""
    return {Device(device): int(count * MIB) for device, count in figures.items()}


def to_mib(size):
    """Return a size in MiB of one in bytes."""
    return {device: count / MIB for device, count in size.items()}


def package(key, *, declared=None, files=0, gpus=None, processes=1):
    """Return an inspected package; `declared` and `files` are MiB."""
    return Package(
        root="/models/m",
        parts=(),
        size_bytes=files * MIB,
        declared_bytes=None if declared is None else declared * MIB,
        content_key=key,
        gpus=gpus,
        processes=processes,
    )


def known(count=None, *, key="n", declared=None, **figures):
    """Return a need that was measured, or is declared."""
    size = to_bytes({GPU: count} if count is not None else figures)
    declared_size = to_bytes({GPU: declared} if declared is not None else {})
    return Need(key, size, Basis.DECLARED, declared=declared_size, known_bytes=size)


def guess(count=None, *, key="n", **figures):
    """Return a need that was guessed."""
    size = to_bytes({GPU: count} if count is not None else figures)
    return Need(key, size, Basis.FILES, is_known=False)


class Books:
    """A ledger whose callers think in MiB."""

    def __init__(self, limits, *, headroom=0, process_limit=None, numbers=None):
        self.ledger = Ledger(
            {
                Device(name): DeviceBook(
                    limit * MIB,
                    headroom * MIB,
                    None if process_limit is None else process_limit * MIB,
                    (numbers or {}).get(name),
                )
                for name, limit in limits.items()
            }
        )
        self.now = 0.0

    @property
    def before_reading(self):
        """Return a time shortly before the last reading."""
        return self.now - 0.5

    # -- what is known ----------------------------------------------------------------------

    def free(self, device=GPU):
        return self.ledger.free(device) / MIB

    def settled(self, device=GPU):
        return self.ledger.devices[device].settled_bytes / MIB

    def empty(self, device=GPU):
        count = self.ledger.devices[device].empty_bytes
        return None if count is None else count / MIB

    def not_attributed(self, device=GPU):
        return self.ledger.not_attributed(device) / MIB

    def booked(self, name, device=GPU):
        return self.ledger.models[name][device] / MIB

    def reserved(self, name, device=GPU):
        return self.ledger.loads[name].reserved[device] / MIB

    def size(self, key):
        """Return what was learned: MiB by device, and whether it was measured."""
        size = self.ledger.sizes.find(key)
        return to_mib(size.bytes), size.is_measured

    def need(self, key, **options):
        """Return the need of a package; `limit` is that of a guess, `device` the place."""
        limit = options.pop("limit", None)
        device = options.pop("device", None)
        limit_bytes = None if limit is None else limit * MIB
        inspected = package(key, **options)
        return self.ledger.need_of(inspected, device=device, guess_limit_bytes=limit_bytes)

    # -- what happens -----------------------------------------------------------------------

    def read(self, used=None, *, lag=0.0, available=None, after=1.0, **figures):
        """Take a reading, a second after the last one."""
        self.now += after
        size = to_bytes({GPU: used} if used is not None else figures)
        has_available = {} if available is None else {HOST: available * MIB}
        self.ledger.observe(size, self.now, lag, has_available)
        self.ledger.advance(self.now)

    def wait(self, seconds):
        """Let time pass without a reading."""
        self.now += seconds
        self.ledger.advance(self.now)

    def add(self, name, count, device=GPU):
        """Add a model of a known size that this life of Triton has loaded."""
        size = to_bytes({device: count})
        book = self.ledger.devices[device]
        empty_bytes = book.empty_bytes
        if book.used_bytes is not None:
            book.used_bytes += size[device]
        self.ledger.adopt(TritonName(name), size)
        book.empty_bytes = empty_bytes

    def load(self, name, need):
        self.ledger.begin_load(TritonName(name), need)
        self.ledger.send_load(TritonName(name))

    def settle(self, name) -> Settlement:
        """End a load well; the last reading shows it."""
        self.ledger.end_load(name, self.before_reading)
        assert self.ledger.can_settle(name)
        return self.ledger.settle(name)

    def fail(self, name, *, is_out_of_memory=True):
        self.ledger.fail_load(name, self.before_reading, is_out_of_memory=is_out_of_memory)

    def unload(self, name, used=None, **figures):
        """Unload a model, after which a reading shows that so much is used."""
        self.ledger.begin_unload(name)
        self.read(used, **figures)
        self.ledger.end_unload(name, self.before_reading)

    # -- what is decided --------------------------------------------------------------------

    def request(
        self,
        *,
        evict=(),
        busy=(),
        purpose=Purpose.EXPLICIT,
        waited=0.0,
        deadline=math.inf,
        is_mesh_evicting=False,
    ):
        names = [*evict, *(name for name in busy if name not in evict)]
        candidates = tuple(Evictable(TritonName(name), name in busy) for name in names)
        started_at = self.now - waited
        return MemoryRequest(purpose, started_at, deadline, candidates, is_mesh_evicting)

    def decide(self, need, **options) -> Decision:
        return decide(self.ledger, need, self.request(**options), self.now)

    def place(self, needs, **options) -> Decision:
        return decide_place(self.ledger, needs, self.request(**options), self.now)

    def answer(self, need, **options) -> Answer:
        return self.decide(need, **options).answer

    def victims(self, need, **options):
        decision = self.decide(need, **options)
        assert bool(decision.victims) == (decision.answer is Answer.EVICT)
        return list(decision.victims)


def gpu(limit, used=0, **options):
    """Return books of one GPU; without readings if `used` is None."""
    books = Books({GPU: limit}, **options)
    if used is not None:
        books.read(used)
    return books
