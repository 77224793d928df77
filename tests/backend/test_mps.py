"""The limits of MPS, as its variable says them, and where the ledger applies them."""

import pytest

from adapter.backend.memory.nvml import mps_limits
from adapter.core.ledger import UNSEEN, Ledger
from adapter.core.memory import Device, DeviceReading, MemoryReading
from adapter.errors import MemoryFigures

ONE, TWO = Device("GPU-1"), Device("GPU-2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("0=8G", {0: 8 * 2**30}),
        ("0=1G, 1=512MB", {0: 2**30, 1: 2**29}),
        ("0=1g,GPU-a=2G,1=,x", {0: 2**30}),
    ],
)
def test_the_variable_names_a_limit_for_each_gpu(text, expected):
    assert mps_limits(text) == expected


def test_the_limit_of_a_process_is_kept_for_the_gpu_of_its_number():
    ledger = Ledger(None, lambda _: 0, {0: 400})
    ledger.open(MemoryReading({ONE: DeviceReading(1000, 0, 0), TWO: DeviceReading(1000, 0, None)}))
    books = ledger.snapshot().devices
    assert (books[ONE].client_limit_bytes, books[TWO].client_limit_bytes) == (400, None)
    assert ledger.snapshot().most_of_one(MemoryFigures(None, None, 1000, ONE)) == 400
    assert ledger.snapshot().most_of_one(MemoryFigures(None, None, 1000, TWO)) == 1000
    assert ledger.snapshot().most_of_one(MemoryFigures()) is None


def test_where_no_gpu_is_read_the_largest_limit_of_a_process_counts():
    ledger = Ledger(1000, lambda _: 0, {0: 400, 1: 500})
    ledger.open(None)
    assert ledger.snapshot().devices[UNSEEN].client_limit_bytes == 500
