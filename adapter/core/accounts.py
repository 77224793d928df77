"""Keeps what each loaded model takes, as far as readings show it.

Where a reading tells processes apart, as that of host memory does for python models, a model takes
what its own processes take, whatever else is going on. The rest, and all memory of GPUs, is
attributed by what happened between two readings (core/measuring.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adapter.core.account import FOLLOWS, Account, Level, Stage
from adapter.core.ledger import Ledger
from adapter.core.measuring import GpuBytes, Growth, Measured, Window, differs, on_devices
from adapter.core.memory import (
    HOST,
    NO_BYTES,
    UNSEEN,
    Bytes,
    Device,
    MemoryReading,
    at_least_zero,
    minus,
    most_of,
    plus,
    total,
)
from adapter.core.model import Package, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Sizes, remember
from adapter.core.state import IllegalTransition

# Growth below this is noise.
_NOISE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """The bytes in use by each model's own processes, and `shared` by no single model."""

    shared: int
    of_models: Mapping[str, int]

    def of(self, names: Collection[str]) -> int:
        return sum(self.of_models.get(name, 0) for name in names)


class Accounts:
    def __init__(self) -> None:
        self.models: dict[TritonName, Account] = {}  # registry.py, which knows no memory, is below
        # indexes: a load and an unload look at no other model
        self._unsettled: dict[Account, None] = {}  # those of `models` that are not SETTLED
        self._together: set[Account] = set()  # those that are not apart
        self._unread: dict[Account, None] = {}  # no reading has shown yet which of both they are
        self.unloads = dict[ModelRecord, None]()  # under way, until their memory is back
        self._window, self._growth = Window(), Growth(self.models)
        self._requests_before = 0
        self._level = Level()  # of what readings do not tell apart
        self.ended_unloads = 0

    def add(self, account: Account) -> None:
        self.models[account.name] = account
        if not account.is_apart:
            self._together.add(account)
        if account.stage is not Stage.SETTLED:
            self._unsettled[account] = None

    def forget(self, name: TritonName) -> Account | None:
        """Remove the model, and return its account."""
        self._window.forget(name)
        account = self.models.pop(name, None)
        if account is not None:
            self._together.discard(account)
            self._unread.pop(account, None)
            self._to(account, Stage.GONE)
        return account

    def key_of(self, name: TritonName) -> str:
        account = self.models.get(name)
        return account.package_key if account else ""

    def is_measured(self, name: TritonName) -> bool:
        """Return whether what the ledger holds is final, except for growth under traffic."""
        account = self.models.get(name)
        return account not in self._unsettled or account.reported is not None

    def quiet_since(self, name: TritonName) -> float | None:
        """Return since when a load holds no more memory than before (time.monotonic); None while
        it may take some, and for a model that is not being loaded.
        """
        account = self.models.get(name)
        is_loading = account is not None and account.stage is Stage.LOADING
        return account.quiet_since if account and is_loading else None

    @property
    def loads(self) -> list[Account]:
        """The loads that are under way, or being measured."""
        return [a for a in self._unsettled if a.stage is not Stage.DUE]

    @property
    def moving(self) -> list[Account]:
        """Return those of `loads` that may take memory: not those that stand still."""
        return [account for account in self.loads if account.still_since is None]

    def watch(self, split: MemorySplit, now: float, seconds: float, *, unloads: bool) -> None:
        """Note which loads stand still: neither their processes nor what belongs to no single model
        has grown for `seconds`. One goes on when its processes grow, or shared memory does and
        nothing else can be the reason.
        """
        moving = self.moving
        shared = split.shared
        has_grown = self._level.read(shared, now)
        is_theirs = has_grown and not moving and not unloads
        for account in self.loads:
            count = split.of(account.names)
            is_own = count > 0 and account.names <= split.of_models.keys()
            may_be_its = not is_own and (not moving or account.still_since is None)
            if unloads:  # what they free may be taken again by the load
                account.peaks.shared = min(account.peaks.shared, shared)
            account.peaks.read(count, shared, now, is_theirs=may_be_its)
            is_quiet = now - (quiet := max(account.begun, account.peaks.since)) >= seconds
            account.quiet_since = quiet if is_quiet else None
            own = account.level.read(count, now)
            if own or (is_theirs and not is_own) or account.stage is not Stage.LOADING:
                account.still_since = None
            elif account.still_since is None:
                since = max(account.begun, account.level.since, self._level.since)
                if now - since >= seconds:
                    account.still_since = since

    def taken(self, name: TritonName) -> Bytes:
        """Return the last measurement of the model."""
        account = self.models.get(name)
        return (account.taken if account else None) or NO_BYTES

    def in_processes(self, name: TritonName, reading: MemoryReading | None) -> int:
        """Return the bytes of the processes that belong to this model alone."""
        account = self.models.get(name)
        if account is None or reading is None or not reading.of_models:
            return 0
        return sum(reading.of_models.get(name, 0) for name in account.names)

    def apart(self, name: TritonName) -> frozenset[str]:
        """Return the names in Triton of a model in processes of its own; of any other none."""
        account = self.models.get(name)
        return account.names if account is not None and account.is_apart else frozenset()

    @property
    def are_apart(self) -> bool:
        """Whether every model is in processes of its own: shared memory is Triton's then."""
        return not self._together

    # -- loads and unloads ------------------------------------------------------------------

    def open(self, reading: MemoryReading | None, requests: int) -> None:
        """Start measuring at a quiet moment. `requests`: how many inferences have ended."""
        self._settle()  # what is not measured by now never will be
        for account in self.loads:
            account.is_passed |= account.still_since is not None
        self._window.open(reading and reading.shared)
        self._growth.end(reading)
        self._requests_before = requests

    def loaded(
        self, account: Account, reading: MemoryReading | None, *, known: bool
    ) -> Measured | None:
        """Note a successful load; return its measurement if Triton has reported it, or if the
        reading tells its processes apart.

        `known`: its estimate was learned from this very package.
        """
        name = account.name
        self._to(account, Stage.LOADED)
        needs, measured = account.estimate.needs, None
        if account.reported is not None:
            needs, known = account.reported, True
            measured = self.measured(name, needs)
        elif reading is None:
            self._unread[account] = None
        elif (measured := self._told_apart(account, reading)) is not None:
            return measured
        if account.is_passed:
            self._window.loaded_beside(name, needs)
        else:
            self._window.loaded(name, account.package_key, needs, known=known)
        return measured

    def load_ended(self, account: Account, reading: MemoryReading | None) -> None:
        """Note that no measurement of the load is under way any more."""
        if account.stage is not Stage.LOADED:
            return
        is_due = reading is not None and not account.is_apart
        self._to(account, Stage.DUE if is_due else Stage.SETTLED)

    def released(self, name: TritonName, held: Bytes) -> None:
        """Note an unload. That of a model in processes of its own frees no shared memory."""
        account = self.models.get(name)
        if account is None or not account.is_apart:
            self._window.released(name, held)

    def undone(self, name: TritonName, held: Bytes) -> None:
        """Note that a failed load is undone. What one that Triton had loaded took before the window
        is free now; what any other took nobody knows.
        """
        account = self.models.get(name)
        if account is not None and account.stage is not Stage.LOADING:
            self.released(name, held)
        self._window.disturbed()

    def close(self, reading: MemoryReading | None, requests: int) -> list[Measured]:
        """Measure, at the next quiet moment, the loads that readings do not tell apart.

        `requests`: how many inferences have begun; if more than had ended at `open`, no load was
        alone, and no measurement is exact. Of a load that Triton has reported, the result is only
        what the reading shows beside that.
        """
        if requests != self._requests_before:
            self._window.disturbed()
        self._settle()
        for account in self.loads:
            self._window.disturbed()  # it may have gone on
            is_new = account.still_since is not None and not account.is_passed
            if is_new and not _is_apart(account, reading):
                # what it took before it stood still is in the window
                self._window.loaded_beside(account.name, account.estimate.needs)
            account.is_passed = True
        found = self._read_late(reading)
        for part in self._window.close(reading and reading.shared):
            if self.models[part.name].reported is not None:
                found.append(part)
                continue
            own = self.in_processes(part.name, reading)
            taken = plus(part.bytes, {HOST: own}) if own else part.bytes
            found.append(self.measured(part.name, taken, exact=part.exact))
        self._growth.begin(reading)
        return found

    # -- in between -------------------------------------------------------------------------

    @property
    def are_unread(self) -> bool:
        """Return whether the next reading must measure models that were loaded without one."""
        return bool(self._unread)

    def tick(
        self,
        reading: MemoryReading | None,
        settled: MemoryReading | None,
        active: Collection[TritonName],
        baseline: Bytes,
    ) -> list[Measured]:
        """Return the models that have grown under traffic, and those that are read late.

        `settled` is `reading` if it shows only what traffic did, else None. `active`: the models
        with requests since the last tick. `baseline`: what no model takes. Growth of host memory
        outside the models' processes is attributed to none: Triton needs it for large requests.
        """
        found = self._read_late(reading)
        for name, account in self.models.items():
            own = self.in_processes(name, reading) if account.is_apart else 0
            if own:
                account.taken = {HOST: own}
                found += self._grown(account, account.taken)
        if settled is None or settled.of_models is None:
            grown = self._growth.tick(settled, active, baseline)
            if grown is not None and grown.least is not None:
                found += self._grown(grown, grown.least)
        return found

    def _read_late(self, reading: MemoryReading | None) -> list[Measured]:
        """Measure the models whose loads were not read, if they are in processes of their own."""
        if reading is None:
            return []
        unread, self._unread = self._unread, {}
        found = [each for account in unread if (each := self._told_apart(account, reading))]
        for each in found:
            self._window.forget(each.name)
        return found

    def _told_apart(self, account: Account, reading: MemoryReading) -> Measured | None:
        """Measure a model all of which the reading shows in processes of its own."""
        if not _is_apart(account, reading):
            return None
        account.is_apart = True
        self._together.discard(account)
        own = self.in_processes(account.name, reading)
        return self.measured(account.name, {HOST: own})

    def _settle(self) -> None:
        for account in [*self._unsettled]:
            if account.stage is not Stage.LOADING:
                self._to(account, Stage.SETTLED)

    def _to(self, account: Account, stage: Stage) -> None:
        if stage not in FOLLOWS[account.stage]:
            raise IllegalTransition(f"{stage.name} after {account.stage.name}")
        account.stage = stage
        if stage in {Stage.SETTLED, Stage.GONE}:
            self._unsettled.pop(account, None)

    def _grown(self, account: Account, taken: Bytes) -> list[Measured]:
        if total(minus(taken, account.most or NO_BYTES)) < _NOISE_BYTES:
            return []
        return [self.measured(account.name, taken)]

    def measured(self, name: TritonName, taken: Bytes, *, exact: bool = True) -> Measured:
        """Note what the model takes; `exact`: by itself."""
        account = self.models[name]
        if exact:
            most = account.most or NO_BYTES
            account.taken = taken
            account.most = most_of(most, taken)
            if not account.is_apart:
                account.least = at_least_zero(taken)
        return Measured(name, account.package_key, taken, exact)


def _is_apart(account: Account, reading: MemoryReading | None) -> bool:
    """Return whether the reading shows all of the model in processes of its own."""
    of_models = reading.of_models if reading is not None else None
    return bool(account.names) and account.names <= (of_models or {}).keys()


class Reports:
    """Keeps the sizes that Triton reports, for the backends that report, and decides whether to
    believe them.

    The first load on a GPU makes a CUDA context of tritonserver, which is not reported and which no
    unload gives back.
    """

    def __init__(self, ledger: Ledger, sizes: Sizes) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._backends: set[str] = set()  # that report
        self._warm: set[Device] = set()  # with a CUDA context of tritonserver
        self._told: dict[str, None] = {}  # packages whose reports differ
        self._lives = -1  # of the Triton that was last asked

    def is_due(self, package: Package) -> bool:
        """Return whether Triton will report what the package takes once it is loaded."""
        return bool(package.backends) and self._backends.issuperset(package.backends)

    def asks(self, lives: int) -> bool:
        """Return whether Triton, which became live so often, is to be asked about a load: there is
        a device that it may report of.
        """
        if lives != self._lives:
            self._lives = lives
            self._warm.clear()
        books = self._ledger.snapshot().devices
        return any(d == UNSEEN or book.index is not None for d, book in books.items())

    def came(self, account: Account, package: Package, usage: Collection[GpuBytes]) -> None:
        """Note what Triton has reported of each model of a package that was loaded."""
        if not usage:
            return
        account.reported = on_devices(usage, self._ledger.snapshot().devices)
        if account.reported is None:
            self._backends.difference_update(package.backends)
            return
        self._backends.update(package.backends)
        account.is_first = not self._warm.issuperset(account.reported)
        self._warm.update(account.reported)

    def larger(self, account: Account, seen: Bytes, reading: MemoryReading | None) -> Bytes | None:
        """Return what counts in place of a report, where the load was alone and the reading shows
        more. What the first load on a GPU took beyond its report is Triton's own.
        """
        reported = account.reported or {}
        if account.is_first:
            account.is_first = False
            self._ledger.rebase(reading)
            self._sizes.saw_baseline(self._ledger.snapshot().baseline)
            return None
        larger = most_of(reported, seen)
        return larger if differs(reported, seen) and larger != reported else None

    def is_news(self, account: Account, seen: Bytes) -> bool:
        """Return True the first time that the report of a package differs from what is seen, unless
        the load made a CUDA context.
        """
        if account.is_first or not differs(account.reported or {}, seen):
            return False
        is_news = account.package_key not in self._told
        remember(self._told, account.package_key, None)
        return is_news
