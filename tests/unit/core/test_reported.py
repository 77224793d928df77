"""What Triton reports of a model's memory, and when it is believed."""

import pytest

from adapter.core.account import Account
from adapter.core.accounts import Reports
from adapter.core.ledger import UNSEEN, DeviceBook, Ledger
from adapter.core.measuring import GpuBytes, differs, on_devices
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId, ModelSource, Package, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Basis, Estimate, Sizes

MIB, GIB = 2**20, 2**30
M = ModelId("m")
ONE, TWO = Device("GPU-1"), Device("GPU-2")


GPUS = {ONE: DeviceBook(9, 0, 0, 0, 0, 0), TWO: DeviceBook(9, 0, 0, 0, 0, 1)}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ([{0: 5}], {ONE: 5}),
        ([{0: 5, 1: 7}], {ONE: 5, TWO: 7}),
        ([{0: 5}, {0: 1, 1: 2}], {ONE: 6, TWO: 2}),
        ([{0: 5, 3: 0}], {ONE: 5}),
        ([], None),
        ([{}], None),
        ([{0: 0}], None),
        ([{0: 5}, {}], None),
        ([{3: 5}], None),
    ],
)
def test_a_package_is_reported_when_each_of_its_models_is_on_known_gpus(usage, expected):
    assert on_devices(usage, GPUS) == expected


def test_where_no_gpu_is_read_all_that_is_reported_counts_together():
    book = {UNSEEN: DeviceBook(9, 0, 0, 0, 0)}
    assert on_devices([{0: 5, 1: 6}], book) == {UNSEEN: 11}


@pytest.mark.parametrize("device", [HOST, ONE])
def test_nothing_is_reported_of_host_memory_or_of_a_gpu_without_a_number(device):
    assert on_devices([{0: 5}], {device: DeviceBook(9, 0, 0, 0, 0)}) is None


@pytest.mark.parametrize(
    ("reported", "seen", "expected"),
    [
        ({ONE: 100 * MIB}, {ONE: 111 * MIB}, False),
        ({ONE: 100 * MIB}, {ONE: 112 * MIB}, True),
        ({ONE: 100 * MIB}, {ONE: 89 * MIB}, True),
        ({ONE: 1 * MIB}, {ONE: 5 * MIB}, False),
        ({ONE: 100 * MIB}, {ONE: 100 * MIB, TWO: 5 * MIB}, True),
    ],
)
def test_a_tenth_more_or_less_is_a_difference_and_noise_is_none(reported, seen, expected):
    assert differs(reported, seen) is expected


def package(*backends: str) -> Package:
    return Package("", (), 0, None, "key", frozenset(backends))


def loaded(reports: Reports, key: str, *usage: GpuBytes, backends: str = "onnxruntime") -> Account:
    """The account of a model that was loaded with what Triton reports of it."""
    account = Account(
        ModelRecord(M, TritonName("m"), ModelSource("")), key, Estimate({}, Basis.DEFAULT)
    )
    reports.came(account, package(backends), usage)
    return account


@pytest.fixture
def reports() -> Reports:
    ledger = Ledger(None, lambda _: 0)
    gpus = {ONE: DeviceReading(GIB, 0, 0), TWO: DeviceReading(GIB, 0, 1)}
    ledger.open(MemoryReading(gpus, "nvml"))
    return Reports(ledger, Sizes())


def test_a_backend_reports_from_its_first_report_until_it_is_silent(reports):
    assert not reports.is_due(package("onnxruntime"))
    loaded(reports, "a", {0: 5})
    assert reports.is_due(package("onnxruntime"))
    assert not reports.is_due(package("onnxruntime", "python"))
    assert not reports.is_due(package())
    loaded(reports, "a", {})
    assert not reports.is_due(package("onnxruntime"))


def test_the_first_load_on_a_gpu_is_first_once_in_the_life_of_triton(reports):
    assert reports.asks(1)
    assert loaded(reports, "a", {0: 1}).is_first
    assert not loaded(reports, "b", {0: 1}).is_first
    assert loaded(reports, "c", {0: 1, 1: 1}).is_first
    assert reports.asks(2)
    assert loaded(reports, "d", {0: 1}).is_first


def test_a_package_is_news_once(reports):
    loaded(reports, "first", {0: 1})
    accounts = [loaded(reports, key, {0: 1}) for key in "aba"]
    assert [reports.is_news(each, {ONE: GIB}) for each in accounts] == [True, True, False]
