"""Records one model's memory, from its admission to its end."""

from dataclasses import dataclass, field
from enum import Enum

from adapter.core.ledger import LedgerSnapshot
from adapter.core.memory import Bytes, MemoryReading
from adapter.core.model import TritonName
from adapter.core.registry import ModelRecord
from adapter.core.sizing import KNOWN, Basis, Estimate

# Growth below this is noise of what all processes share, such as Triton's buffers for traffic.
_STILL_BYTES = 4 * 2**20


@dataclass(slots=True)
class Level:
    """Bytes that are read again and again. `since`: when they last grew."""

    least: int = 0
    since: float = 0.0

    def read(self, count: int, now: float) -> bool:
        """Return whether the bytes have grown."""
        has_grown = count > self.least + _STILL_BYTES
        if has_grown:
            self.since = now
        if has_grown or count < self.least:
            self.least = count
        return has_grown


@dataclass(slots=True)
class Peaks:
    """The most that a load's processes, and all the others, have held since it began, and since
    when that is. What only comes back after a dip is none: the share of a process in pages of
    files falls and rises as others map them.
    """

    own: int = 0
    shared: int = 0
    since: float = 0.0

    def read(self, own: int, shared: int, now: float, *, is_theirs: bool) -> None:
        if own > self.own + _STILL_BYTES:
            self.own, self.since = own, now
        if shared > self.shared + _STILL_BYTES:
            self.shared, self.since = shared, now if is_theirs else self.since


class Stage(Enum):
    """How far the memory of a model is known. docs/states.md is drawn from it."""

    LOADING = "Triton loads it, and an estimate is reserved"
    LOADED = "the estimate is held, and is being measured"
    DUE = "the estimate is held, and measured at the next quiet moment"
    SETTLED = "it was measured, or will not be any more"
    GONE = "it was unloaded, or its load has failed"


FOLLOWS = {
    Stage.LOADING: (Stage.LOADED, Stage.GONE),
    Stage.LOADED: (Stage.DUE, Stage.SETTLED, Stage.GONE),
    Stage.DUE: (Stage.SETTLED, Stage.GONE),
    Stage.SETTLED: (Stage.GONE,),
    Stage.GONE: (),
}


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A model that Triton was told to unload: the bytes that it held, and the reading and the
    ledger from before the unload.

    `taken`: what of `held` it had at the end, as far as is known: the ledger keeps its peak, and
    the memory of a process that died was back before. `apart` are its names in Triton where all
    that it held is in processes of its own.
    """

    held: Bytes
    taken: Bytes
    before: MemoryReading | None
    booked: LedgerSnapshot
    apart: frozenset[str]


@dataclass(slots=True, eq=False)
class Account:
    """Records a model's memory, from its admission to its end.

    `begun` is when its load got to Triton (time.monotonic). `basis` says what the figure in the
    ledger stands on: LEARNED after a measurement. `names` are its names in Triton, and those of its
    helpers and steps. `taken`: the last measurement, `most`: the highest since the load; None
    before the first; `least`: what it takes at least by now, where only the totals of devices tell.
    `is_apart`: all that the model takes is in processes of its own. `asked_at`: when Triton was
    asked for its unload. `exceeded`: its load passed a limit, and is undone.
    `is_planned`: as in Terms. `still_since`: since when its load has taken nothing, None while it
    may; `quiet_since`: since when it holds no more than before, which it may have given back
    meanwhile. `is_passed`: others are measured during its load, so that it cannot be. `is_told`:
    as in AdmissionInput, `reported` is what it did, and `is_first`: with a
    CUDA context beside it, which is Triton's.
    """

    record: ModelRecord
    package_key: str
    estimate: Estimate
    begun: float = 0.0
    stage: Stage = Stage.LOADING
    basis: Basis = field(init=False)
    names: frozenset[str] = frozenset()
    taken: Bytes | None = None
    most: Bytes | None = None
    least: Bytes | None = None
    is_apart: bool = False
    is_planned: bool = False
    still_since: float | None = None
    is_passed: bool = False
    quiet_since: float | None = None
    is_told: bool = False
    reported: Bytes | None = None
    is_first: bool = False
    level: Level = field(default_factory=Level)
    peaks: Peaks = field(default_factory=Peaks)
    asked_at: float | None = None
    exceeded: Unloaded | None = None

    def __post_init__(self) -> None:
        self.basis = self.estimate.basis

    @property
    def name(self) -> TritonName:
        return self.record.name

    @property
    def is_guessed(self) -> bool:
        """Return whether the ledger holds a guess: a reading need not show its removal."""
        return self.basis not in KNOWN
