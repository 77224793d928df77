"""Notes what a load or an unload waits for, in its record and in the log."""

import logging

from adapter.core.ledger import LedgerSnapshot
from adapter.core.memory import MemoryReading
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.core.residency.terms import Terms
from adapter.core.sizing import Estimate
from adapter.core.state import WaitsFor

log = logging.getLogger(__name__)


def step(record: ModelRecord, waits_for: WaitsFor, awaits: tuple[ModelId, ...] = ()) -> None:
    """Note the next step of a load or an unload, and the models that it waits for."""
    record.waits_for, record.awaits = waits_for, awaits
    log.debug("model.step", extra={"model_id": record.id, "waits_for": waits_for.value})


class Admission:
    """Logs one load's way to its memory: each reason to wait once, and the admission."""

    def __init__(self, record: ModelRecord) -> None:
        self._record = record
        self._told: WaitsFor | None = None
        step(record, WaitsFor.TURN)

    def waits(
        self,
        what: WaitsFor,
        estimate: Estimate,
        book: LedgerSnapshot,
        reading: MemoryReading | None,
        awaits: tuple[ModelId, ...] = (),
    ) -> None:
        self._record.waits_for, self._record.awaits = what, awaits
        if what is not self._told:
            self._told = what
            fields: dict[str, object] = {"model_id": self._record.id, "waits_for": what.value}
            if awaits:
                fields["awaits"] = [*awaits]
            log.info("model.load_waits", extra=fields | _figures(estimate, book, reading))

    def admitted(
        self,
        estimate: Estimate,
        book: LedgerSnapshot,
        reading: MemoryReading | None,
        terms: Terms,
    ) -> None:
        self._record.basis = estimate.basis
        self._record.gpu = terms.gpu = estimate.gpu.number if estimate.gpu else None
        if terms.gpu is not None:
            put = {"model_id": self._record.id, "gpu": terms.gpu, "ran_out_on": [*terms.ran_out]}
            log.info("model.placed", extra=put | _figures(estimate, book, reading))
        if log.isEnabledFor(logging.DEBUG):
            fields = {"model_id": self._record.id, "basis": estimate.basis.value}
            log.debug("model.admitted", extra=fields | _figures(estimate, book, reading))


def _figures(
    estimate: Estimate, book: LedgerSnapshot, reading: MemoryReading | None
) -> dict[str, object]:
    """Bytes by device."""
    free = book.free(reading)
    return {
        "needed_bytes": dict(estimate.needs),
        "free_bytes": {device: free[device] for device in estimate.needs if device in free},
    }
