"""Decides when lost memory is worth a restart of Triton, and lists the phases of a recycle."""

from enum import Enum

from adapter.core.ledger import LedgerSnapshot
from adapter.core.memory import Device
from adapter.core.sizing import format_size
from adapter.errors import MemoryFigures

# So long must memory be lost: growth under traffic may be learned a little later.
_SECONDS = 60.0
# A restart that leaves more than this share of what was lost has not helped.
_LEFT_SHARE = 0.5


class RecyclePhase(Enum):
    """The phases of a recycle; docs/states.md draws them."""

    OFF = "Triton is left alone"
    DRAINING = "new calls and loads wait, those under way go on"
    RESTARTING = "the process was ended, and all wait for the next one"
    RETURNING = "models are loaded again; calls wait for theirs, loads for all"


RECYCLE_FOLLOWS = {
    RecyclePhase.OFF: (RecyclePhase.DRAINING,),
    RecyclePhase.DRAINING: (RecyclePhase.RESTARTING, RecyclePhase.OFF),
    RecyclePhase.RESTARTING: (RecyclePhase.RETURNING,),
    RecyclePhase.RETURNING: (RecyclePhase.OFF,),
}


class LostMemory:
    """Decides when unaccounted memory is worth a restart: `share` of a device's limit; None: never.

    A restart that did not free what was lost on a device is not repeated for it: another process
    has it, or the models take it again.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self._since: float | None = None
        self._lost: dict[Device, int] = {}  # at the last restart, until a restart may help again

    def why_now(self, book: LedgerSnapshot, now: float, *, is_quiet: bool) -> str | None:
        """Return why Triton is to be restarted; None where it is not. To be called regularly.
        `is_quiet`: nothing is loaded or unloaded, and the book is of a reading after the last such.
        """
        self.look(book)
        if self.share is None or not is_quiet:
            self._since = None
            return None
        limits = {device: each.limit_bytes for device, each in book.devices.items()}
        above = [d for d in limits if _unaccounted(book, d) > self.share * limits[d]]
        found = next((device for device in above if device not in self._lost), None)
        if found is None:
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        return _why(book, found) if now - self._since >= _SECONDS else None

    def look(self, book: LedgerSnapshot) -> None:
        """Forget a device once most of what was lost on it is free again."""
        for device, before in [*self._lost.items()]:
            if _unaccounted(book, device) <= before * _LEFT_SHARE:
                del self._lost[device]

    def why_for(self, figures: MemoryFigures, book: LedgerSnapshot) -> str | None:
        """Return why Triton is to be restarted for a load that was refused with these figures."""
        device = Device(figures.device or "")
        if self.share is None or device in self._lost or figures.needed_bytes is None:
            return None
        lost = _unaccounted(book, device)
        fits = figures.needed_bytes <= (figures.free_bytes or 0) + lost
        return _why(book, device) if lost > 0 and fits else None

    def restarts(self, book: LedgerSnapshot) -> None:
        """Note that Triton is restarted."""
        self._since = None
        self._lost = {d: lost for d in book.devices if (lost := _unaccounted(book, d)) > 0}


def _unaccounted(book: LedgerSnapshot, device: Device) -> int:
    known = book.devices.get(device)
    return 0 if known is None else known.unaccounted_bytes or 0


def _why(book: LedgerSnapshot, device: Device) -> str:
    return f"{format_size(_unaccounted(book, device))} of {device} are unaccounted for"
