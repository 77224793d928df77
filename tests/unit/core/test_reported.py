"""What Triton reports of a model's memory, and when it is believed."""

import pytest

from adapter.core.ledger import UNSEEN, DeviceBook
from adapter.core.measuring import Reports, differs, on_devices
from adapter.core.memory import HOST, Device

MIB = 2**20
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


def test_a_backend_reports_from_its_first_report_until_it_is_silent():
    reports = Reports()
    assert not reports.are_due({"onnxruntime"})
    reports.came({"onnxruntime"}, is_reported=True)
    assert reports.are_due({"onnxruntime"})
    assert not reports.are_due({"onnxruntime", "python"})
    assert not reports.are_due(())
    reports.came({"onnxruntime"}, is_reported=False)
    assert not reports.are_due({"onnxruntime"})


def test_the_first_load_on_a_gpu_is_first_once_in_the_life_of_triton():
    reports = Reports()
    assert reports.is_first({ONE: 1})
    assert not reports.is_first({ONE: 1})
    assert reports.is_first({ONE: 1, TWO: 1})
    reports.restarted()
    assert reports.is_first({ONE: 1})


def test_a_package_is_news_once():
    reports = Reports()
    assert [reports.is_news(key) for key in "aba"] == [True, True, False]
