"""The book of memory bytes per model: reserved before a load, held after it, released when gone.

Synchronous throughout, hence atomic on the event loop: nobody can decide on a state of the book
that another is changing.
"""

from dataclasses import dataclass

from adapter.core.model import ModelId


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What a memory reader saw, in bytes."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """All in bytes. `baseline` is what Triton takes with no model of ours loaded."""

    limit_bytes: int | None
    headroom_bytes: int
    baseline_bytes: int
    reserved_bytes: int
    held_bytes: int
    models: int

    def free_bytes(self, observed_used_bytes: int | None) -> int | None:
        """What may be handed out: the worse of book and observation, less the headroom.

        The observation lags behind loads that have only begun, the book does not know what others
        take (memory.md section 4, Ollama's rule). None when there is no limit to hold anything to.
        """
        if self.limit_bytes is None:
            return None
        booked = self.baseline_bytes + self.held_bytes + self.reserved_bytes
        used = max(booked, (observed_used_bytes or 0) + self.reserved_bytes)
        return max(0, self.limit_bytes - used - self.headroom_bytes)


class Ledger:
    def __init__(self, limit_bytes: int | None, headroom_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.headroom_bytes = headroom_bytes
        self.baseline_bytes = 0
        self._reserved: dict[ModelId, int] = {}
        self._held: dict[ModelId, int] = {}

    def __repr__(self) -> str:
        return f"<Ledger [{self.snapshot()}]>"

    def reserve(self, model_id: ModelId, size_bytes: int) -> None:
        """Book an estimate for a load that begins."""
        if model_id in self._reserved or model_id in self._held:
            raise ValueError(f"{model_id!r} is in the ledger already")
        if size_bytes < 0:
            raise ValueError(f"{size_bytes} bytes cannot be reserved")
        self._reserved[model_id] = size_bytes

    def settle(self, model_id: ModelId, measured_bytes: int | None) -> int:
        """The load is done: hold what was measured, or the estimate when nothing could be."""
        reserved = self._reserved.pop(model_id)
        self._held[model_id] = reserved if measured_bytes is None else max(0, measured_bytes)
        return self._held[model_id]

    def release(self, model_id: ModelId) -> None:
        """The bytes are free again. Harmless when there are none: undoing may come twice."""
        self._reserved.pop(model_id, None)
        self._held.pop(model_id, None)

    def of(self, model_id: ModelId) -> int:
        return self._held.get(model_id, self._reserved.get(model_id, 0))

    def snapshot(self) -> LedgerSnapshot:
        return LedgerSnapshot(
            limit_bytes=self.limit_bytes,
            headroom_bytes=self.headroom_bytes,
            baseline_bytes=self.baseline_bytes,
            reserved_bytes=sum(self._reserved.values()),
            held_bytes=sum(self._held.values()),
            models=len(self._reserved) + len(self._held),
        )
