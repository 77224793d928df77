"""Chooses the GPU of each model whose package leaves that open (docs/memory.md, Several GPUs)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from adapter.core.admission import AdmissionInput, Answer, decide
from adapter.core.ledger import LedgerSnapshot
from adapter.core.limits import Oversize
from adapter.core.memory import Gpu, MemoryReading
from adapter.core.model import ModelId, Package
from adapter.core.registry import ModelRecord
from adapter.core.residency.terms import Terms
from adapter.core.sizing import Estimate, Sizes
from adapter.errors import AboutMemory, InsufficientMemory, ModelTooLarge

# Returns what a package is expected to take, by where it may be put, the preferred place first.
# The last argument is the number of the GPU that the model was on before it was lost, if any.
Placing = Callable[
    [Sizes, Package, LedgerSnapshot, MemoryReading | None, int | None], Sequence[Estimate]
]


def as_triton_does(
    sizes: Sizes, package: Package, book: LedgerSnapshot, _: MemoryReading | None, __: int | None
) -> Sequence[Estimate]:
    """Leave the choice to Triton, which uses each GPU unless the package names some."""
    indexes = {device: booked.index for device, booked in book.devices.items()}
    return [sizes.estimate(package, indexes)]


def most_free(
    sizes: Sizes,
    package: Package,
    book: LedgerSnapshot,
    reading: MemoryReading | None,
    before: int | None,
) -> Sequence[Estimate]:
    """Put a package that may run on any GPU on one: where it was, else where most is free."""
    gpus = [Gpu(d, b.index) for d, b in book.devices.items() if b.index is not None]
    if not package.leaves_gpu_open or len(gpus) < 2:  # noqa: PLR2004 - there is a choice
        return as_triton_does(sizes, package, book, reading, before)
    free, left = book.free(reading), book.left(reading)

    def order(gpu: Gpu) -> tuple[bool, int, int, int]:
        return gpu.number != before, -free[gpu.device], -left[gpu.device], gpu.number

    return [
        replace(sizes.estimate(package, {gpu.device: gpu.number}), gpu=gpu)
        for gpu in sorted(gpus, key=order)
    ]


Option = tuple[Estimate, AdmissionInput]

# By the setting `gpu_placement`.
PLACINGS: Mapping[str, Placing] = {"triton": as_triton_does, "most_free": most_free}


class Placer:
    """Lists the GPUs that a model may be put on, in the order of `placing`."""

    def __init__(self, sizes: Sizes, oversize: Oversize, placing: Placing) -> None:
        self.placing = placing
        self._sizes, self._oversize = sizes, oversize

    def options(
        self,
        record: ModelRecord,
        package: Package,
        terms: Terms,
        inputs: AdmissionInput,
        reading: MemoryReading | None,
        *,
        now: float,
    ) -> list[Option]:
        """Return where the model may be put, but for GPUs on which its load has run out of memory,
        and what a decision on each stands on. Raises why it ran out where no other is left. `now`:
        time.monotonic().
        """
        places = self.placing(self._sizes, package, inputs.book, inputs.reading, record.gpu)
        left = [e for e in places if e.gpu is None or e.gpu.number not in terms.ran_out]
        if not left:
            raise terms.refusal()
        about, proven = (package.content_key, inputs.book, reading, now), self._oversize.proven
        return [(e, replace(inputs, proven=proven(*about, e.gpu))) for e in left]


def choose_place(
    model_id: ModelId, options: Sequence[Option], terms: Terms
) -> tuple[Answer, Estimate]:
    """Admit the first option that can be admitted now, else wait for one, else raise a refusal,
    which has the figures of all: nothing is evicted before each was tried. Where the load has run
    out of memory elsewhere, that is why it is refused.
    """
    waits: Estimate | None = None
    refusals: list[AboutMemory] = []
    for estimate, inputs in options:
        answer = _decided(model_id, estimate, inputs)
        if answer is Answer.ADMIT:
            return answer, estimate
        if isinstance(answer, AboutMemory):
            refusals.append(answer)
        else:
            waits = waits or estimate
    if waits is not None:
        return Answer.WAIT, waits
    raise terms.refusal() if terms.ran_out else _refusal(refusals)


def _decided(
    model_id: ModelId, estimate: Estimate, inputs: AdmissionInput
) -> Answer | InsufficientMemory | ModelTooLarge:
    try:
        return decide(model_id, estimate, inputs)
    except (InsufficientMemory, ModelTooLarge) as error:
        return error.with_traceback(None)


def _refusal(refusals: Sequence[AboutMemory]) -> AboutMemory:
    """Return that of the first GPU on which eviction may help, else that of the largest."""
    found = [error for error in refusals if isinstance(error, InsufficientMemory)]
    if not found:
        return max(refusals, key=lambda error: error.figures.limit_bytes or 0)
    found[0].elsewhere = tuple(error.figures for error in found[1:])
    return found[0]
