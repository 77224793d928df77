"""The control plane looks ten times as often as it does in production: nobody waits for seconds."""

import pytest

from adapter.control import (
    housekeeping,
    load_limit,
    loader,
    memory,
    readings,
    suspects,
    unloader,
)
from adapter.control.residency import eviction, updater
from adapter.runtime import fair_slots

_TENTHS = [
    *((housekeeping, name) for name in ("_TICK_SECONDS", "_PEAK_SECONDS", "_RECONCILE_SECONDS")),
    *((loader, name) for name in ("_POLL_SECONDS", "_FIRST_POLL_SECONDS")),
    *((module, "_POLL_SECONDS") for module in (memory, readings)),
    *((module, "_LOOK_SECONDS") for module in (eviction, updater, suspects)),
    (fair_slots, "_TICK_SECONDS"),
    (load_limit, "_UNDO_SECONDS"),
    (load_limit, "_POLL_SECONDS"),
    (readings, "_STILL_SECONDS"),
    *((unloader, name) for name in ("_LATE_SECONDS", "_END_FIRST_SECONDS", "_GRACE_SECONDS")),
    (eviction, "_SECONDS"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in _TENTHS:
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.005)
