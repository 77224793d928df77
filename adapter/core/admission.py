"""May this model come in? Decided on figures alone, in one breath with reserving its bytes."""

from adapter.core.ledger import LedgerSnapshot
from adapter.core.model import ModelId
from adapter.core.sizing import Basis, Estimate, format_size
from adapter.errors import InsufficientMemory, MemoryFigures


def admit(
    model_id: ModelId, estimate: Estimate, book: LedgerSnapshot, observed_used_bytes: int | None
) -> None:
    """Raise InsufficientMemory, or return.

    A refusal makes the platform unload other models and come again. So it is given only when
    the need is known (measured before or declared), it does not fit, and there is something that
    could go (memory.md section 7, policy 3). Everything else is tried, and Triton's answer counts.
    """
    free = book.free_bytes(observed_used_bytes)
    if free is None or estimate.basis is Basis.UNKNOWN or estimate.size_bytes <= free:
        return
    if book.models == 0:
        return
    figures = MemoryFigures(estimate.size_bytes, free, book.limit_bytes)
    raise InsufficientMemory(
        f"model {model_id!r} needs {format_size(estimate.size_bytes)} ({estimate.basis.value}); "
        f"{format_size(free)} of {format_size(book.limit_bytes or 0)} are free",
        model_id=model_id,
        figures=figures,
    )
