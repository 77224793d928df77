"""What passed a limit, and how long that is believed of a package."""

from adapter.core.ledger import DeviceBook, LedgerSnapshot
from adapter.core.limits import Oversize, exceeded, refusal
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId
from adapter.errors import InsufficientMemory, MemoryFigures, ModelTooLarge
from tests.cases import rows

GPU = Device("GPU-1")
DAY = 24 * 3600.0


def book(limit: int = 100, models: int = 2, baseline: int = 0, held: int = 0) -> LedgerSnapshot:
    devices = {device: DeviceBook(limit, 10, baseline, 0, held) for device in (HOST, GPU)}
    return LedgerSnapshot(devices, models)


def reading(host: int, gpu: int = 0) -> MemoryReading:
    return MemoryReading({HOST: DeviceReading(100, host), GPU: DeviceReading(100, gpu)})


@rows(
    ("host", "gpu", "with_headroom", "device"),
    [
        (100, 0, False, None),
        (101, 0, False, HOST),
        (101, 0, True, None),
        (110, 0, True, None),
        (111, 0, True, HOST),
        (131, 0, False, None),  # it would be passed without this load too
        (101, 101, False, HOST),
        (0, 101, False, None),  # this load took nothing there
    ],
)
def test_a_limit_is_passed_by_a_load_without_which_it_would_not_be(
    host, gpu, with_headroom, device
):
    found = exceeded(book(), reading(host, gpu), {HOST: 30}, with_headroom=with_headroom)
    assert found == device


def test_a_refusal_has_the_figures_of_the_moment():
    error = refusal(ModelId("m"), GPU, {GPU: 30}, book(), reading(0, 110), is_over=True)
    assert type(error) is InsufficientMemory
    assert error.figures == MemoryFigures(30, 20, 100, GPU)
    assert str(error) == (
        "model 'm' took 30 bytes, where 20 bytes of 100 bytes were free on GPU-1; it was unloaded"
    )


def test_a_refusal_of_a_load_that_was_alone_is_no_reason_to_unload_others():
    error = refusal(ModelId("m"), HOST, {HOST: 30}, book(models=1), reading(110), is_over=False)
    assert type(error) is ModelTooLarge
    assert "needs more than 30 bytes, at which its load was ended" in str(error)
    assert "with nothing else loaded" in str(error)


def test_what_was_measured_too_large_is_believed_for_a_day():
    oversize = Oversize()
    oversize.measured("key", {HOST: 120}, book(), 1000.0)
    assert oversize.proven("key", book(), None, 1000.0 + DAY - 1) == {HOST: 120}
    assert oversize.proven("key", book(), None, 1000.0 + DAY) is None
    assert oversize.proven("other", book(), None, 1000.0) is None


def test_what_was_measured_too_large_is_believed_under_the_same_limit():
    oversize = Oversize()
    oversize.measured("key", {HOST: 120}, book(), 1000.0)
    assert oversize.proven("key", book(limit=101), None, 1000.0) is None


def test_what_fits_after_all_is_not_too_large_any_more():
    oversize = Oversize()
    oversize.measured("key", {HOST: 120}, book(), 1000.0)
    oversize.fits("key")
    assert oversize.proven("key", book(), None, 1000.0) is None


def test_of_many_packages_the_oldest_is_tried_again():
    oversize = Oversize()
    for number in range(10_001):
        oversize.tried(str(number))
    assert [oversize.may_try(key) for key in ("0", "1", "10000")] == [True, False, False]


def test_what_was_too_large_beside_something_unknown_is_tried_again_when_that_is_gone():
    oversize = Oversize()
    oversize.measured("key", {HOST: 60}, book(), 1000.0)
    assert oversize.proven("key", book(), None, 1000.0) is None
    oversize.measured("key", {HOST: 101}, book(), 1000.0)
    assert oversize.proven("key", book(), None, 1000.0) == {HOST: 101}


def test_what_fits_only_where_nothing_else_is_in_memory_is_too_large():
    oversize = Oversize()
    oversize.measured("key", {HOST: 80}, book(baseline=20), 1000.0)
    assert oversize.proven("key", book(baseline=20), None, 1000.0) is None
    assert oversize.proven("key", book(baseline=21), None, 1000.0) == {HOST: 80}


def test_what_was_too_large_beside_others_that_have_left_is_tried_once_more():
    oversize, loaded = Oversize(), book(baseline=30, held=50)
    oversize.measured("key", {HOST: 80}, book(baseline=30), 1000.0)
    assert oversize.proven("key", loaded, reading(80), 1000.0) == {HOST: 80}
    assert oversize.proven("key", loaded, reading(60), 1000.0) is None  # 10 are no model's
    oversize.measured("key", {HOST: 80}, book(baseline=30), 1000.0)
    assert oversize.proven("key", loaded, reading(60), 1000.0) == {HOST: 80}
