"""Decides whether a failure of Triton was a lack of memory, and adds the figures to the error."""

from adapter.control.memory import Memory
from adapter.core.evidence import (
    NO_GPU,
    MemorySample,
    Suspicion,
    corroborated,
    doubted,
    is_of_gpu,
    view_of,
    view_of_shm,
)
from adapter.core.memory import NO_BYTES, Bytes, MemoryReading
from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    CapacityError,
    LoadFailed,
    MemoryFigures,
    ModelFailed,
    OutOfMemory,
)
from adapter.runtime import clock

# How far back to look for a call that has just failed and whose start is not known.
_RECENT_SECONDS = 2.5


class Diagnosis:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._suspicion = Suspicion()

    async def judged(
        self,
        error: AdapterError,
        model_id: ModelId,
        *,
        since: float | None = None,
        predicted: Bytes = NO_BYTES,
    ) -> AdapterError:
        """Return the error to answer with, memory figures included.

        An error whose text may mean a lack of memory becomes OutOfMemory where memory was low since
        `since` (clock.monotonic(); None: within the last seconds).
        """
        if not isinstance(error, CapacityError) and not _is_suspected(error):
            return error
        reading = await self._memory.read()
        samples = self._samples(since)
        is_of_shm = isinstance(error, ModelFailed) and error.of_shm
        view = view_of_shm(samples) if is_of_shm else view_of(samples, predicted=predicted)
        judged = corroborated(error, view, MemoryFigures())
        if isinstance(judged, OutOfMemory) and judged is error:
            if since is None:
                judged = self._believed(judged, model_id, reading)
            elif reading is not None and reading.has_no_gpu and is_of_gpu(judged):
                judged = doubted(judged, NO_GPU, LoadFailed)
        if isinstance(judged, CapacityError):
            judged.figures = self._figures(judged.figures, model_id, reading)
        return judged

    def _believed(
        self, error: OutOfMemory, model_id: ModelId, reading: MemoryReading | None
    ) -> AdapterError:
        """Check the text of an inference that claims to have run out of memory."""
        book = self._memory.ledger.snapshot()
        devices = reading.devices if reading and not reading.lag_seconds else {}
        free = {d: max(0, book.devices[d].limit_bytes - r.used_bytes) for d, r in devices.items()}
        return self._suspicion.judged(
            error,
            self._memory.accounts.key_of(model_id) or model_id,
            free=free,
            has_no_gpu=reading is not None and reading.has_no_gpu,
            is_alone=book.models <= 1,
        )

    def _samples(self, since: float | None) -> list[MemorySample]:
        """Return the last sample from before the call and all samples after it."""
        if since is None:
            first = clock.monotonic() - _RECENT_SECONDS
        else:
            first = max((at for at, _ in self._memory.samples if at <= since), default=since)
        return [sample for at, sample in self._memory.samples if at >= first]

    def _figures(
        self, known: MemoryFigures, model_id: ModelId, reading: MemoryReading | None
    ) -> MemoryFigures:
        """Complete the figures of the failure's text by the ledger's, for the tightest device."""
        book = self._memory.ledger.snapshot()
        needs = self._memory.ledger.of(model_id)
        device = book.tightest(needs, reading)
        if device is None:
            return known
        free = book.free(reading)[device]
        return MemoryFigures(
            needed_bytes=known.needed_bytes or needs.get(device) or None,
            free_bytes=free if known.free_bytes is None else known.free_bytes,
            limit_bytes=known.limit_bytes or book.devices[device].limit_bytes,
            device=known.device or device,
        )


def _is_suspected(error: AdapterError) -> bool:
    return isinstance(error, ModelFailed) and error.suspected is not None
