"""Says what packages need: declared, measured or guessed. Figures are MiB."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core import sizes as module
from adapter.core.byte_sizes import format_size
from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId
from adapter.core.sizes import Basis, Sizes, usable_devices
from tests.unit.core.books import MIB, Books, package, to_bytes, to_mib

ROOMS = to_bytes({"0": 1000, "1": 1000})


def need_of(sizes, key="a", *, usable=("0",), **options):
    """Return the need in MiB, and what it is based on."""
    files = options.pop("files", 0)
    declared = options.pop("declared", None)
    found = sizes.need_of(package(key, files=files, declared=declared), ROOMS, usable, **options)
    return to_mib(found.bytes), found.basis, found.is_known


def learn(sizes, count, *, is_measured=True, key="a", device="0"):
    sizes.learn(key, to_bytes({device: count}), is_measured=is_measured)


def test_guess_is_made_from_the_files():
    sizes = Sizes(size_factor=1.5)
    assert need_of(sizes, files=100) == ({"0": 150}, Basis.FILES, False)
    assert need_of(sizes, files=10) == ({"0": 64}, Basis.FILES, False)


@pytest.mark.parametrize(
    ("backends", "device", "size_factor", "expected"),
    [
        (["onnxruntime"], HOST, None, 410),
        (["onnxruntime", "python"], HOST, None, 410),
        (["python"], HOST, None, 125),
        ([], HOST, None, 125),
        (["onnxruntime"], "0", None, 125),  # a GPU
        (["onnxruntime"], HOST, 2.0, 200),  # the operator has set it
    ],
)
def test_guess_depends_on_the_backend(backends, device, size_factor, expected):
    sizes = Sizes(size_factor=size_factor)
    inspected = replace(package("a", files=100), backends=frozenset(backends))
    need = sizes.need_of(inspected, to_bytes({device: 1000}), [Device(device)])
    assert to_mib(need.bytes)[device] == pytest.approx(expected, abs=1)


def test_guess_is_replaced_by_what_was_booked():
    sizes = Sizes()
    learn(sizes, 300, is_measured=False)
    assert need_of(sizes, files=100) == ({"0": 300}, Basis.BOOKED, False)
    learn(sizes, 10, is_measured=False)
    assert need_of(sizes, files=100) == ({"0": 64}, Basis.BOOKED, False)


def test_larger_of_declared_and_measured_counts():
    sizes = Sizes()
    assert need_of(sizes, declared=200) == ({"0": 200}, Basis.DECLARED, True)
    learn(sizes, 300)
    assert need_of(sizes, declared=200) == ({"0": 300}, Basis.MEASURED, True)
    assert need_of(sizes, declared=400) == ({"0": 400}, Basis.DECLARED, True)
    assert need_of(sizes, files=900) == ({"0": 300}, Basis.MEASURED, True)


def test_measurement_is_replaced_by_the_next():
    sizes = Sizes()
    learn(sizes, 300)
    learn(sizes, 500, is_measured=False)
    assert need_of(sizes) == ({"0": 300}, Basis.MEASURED, True)
    learn(sizes, 200)
    assert need_of(sizes) == ({"0": 200}, Basis.MEASURED, True)


def test_shortage_doubles_the_need_until_success():
    sizes = Sizes()
    sizes.record_shortage("a", to_bytes({"0": 150}))
    assert need_of(sizes, files=80) == ({"0": 300}, Basis.SHORTAGE, False)
    assert need_of(sizes, declared=200) == ({"0": 300}, Basis.SHORTAGE, True)
    assert need_of(sizes, declared=400) == ({"0": 400}, Basis.DECLARED, True)
    sizes.end_shortage("a")
    assert need_of(sizes, files=80) == ({"0": 100}, Basis.FILES, False)


def test_need_is_never_negative():
    """Triton itself and the headroom exceed the limit together."""
    rooms = to_bytes({"0": -100})
    need = Sizes().need_of(package("a", files=100), rooms, ["0"])
    assert to_mib(need.bytes) == {"0": 0}


def test_unlearned_need_counts_on_each_usable_device():
    sizes = Sizes()
    assert need_of(sizes, usable=("0", "1"), declared=200)[0] == {"0": 200, "1": 200}
    sizes.learn("a", to_bytes({"0": 300, "1": 100}), is_measured=True)
    assert need_of(sizes, usable=("0", "1"))[0] == {"0": 300, "1": 100}


def test_size_moves_to_the_place_of_the_package():
    sizes = Sizes()
    learn(sizes, 300)
    assert need_of(sizes, device="1", usable=("0", "1"))[0] == {"1": 300}
    assert need_of(sizes, key="b", device="1", usable=("0", "1"), declared=70)[0] == {"1": 70}
    sizes.record_shortage("c", to_bytes({"0": 100}))
    assert need_of(sizes, key="c", device="1", usable=("0", "1"))[0] == {"1": 200}


def test_size_of_other_hardware_counts_on_each_device():
    sizes = Sizes()
    sizes.learn("a", to_bytes({"old": 300, "older": 100}), is_measured=True)
    assert need_of(sizes, usable=("0", "1"))[0] == {"0": 300, "1": 300}


def test_sizes_belong_to_a_version_of_triton():
    sizes = Sizes(triton_version="2.51")
    learn(sizes, 300)
    sizes.triton_version = "2.60"
    assert need_of(sizes, files=80) == ({"0": 100}, Basis.FILES, False)
    sizes.triton_version = "2.51"
    assert need_of(sizes)[0] == {"0": 300}


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (None, ["gpu-0", "gpu-1", "gpu", HOST]),
        ({0}, ["gpu-0", "gpu", HOST]),  # nobody says which one `gpu` is
        (set(), [HOST]),
    ],
)
def test_package_uses_the_gpus_that_it_names(gpus, devices):
    numbers = {Device("gpu-0"): 0, Device("gpu-1"): 1, Device("gpu"): None, HOST: None}
    names = None if gpus is None else frozenset(gpus)
    assert usable_devices(package("a", gpus=names), numbers) == devices


def test_ledger_knows_rooms_and_numbers():
    books = Books({"0": 1000, "1": 2000}, headroom=50, numbers={"0": 0, "1": 1})
    books.read(**{"0": 100, "1": 0})
    need = books.need("a", declared=5000, gpus=frozenset({0}))
    assert to_mib(need.bytes) == {"0": 850}
    assert to_mib(need.declared) == {"0": 5000}
    assert to_mib(books.need("a", declared=5000, device="1").bytes) == {"1": 1950}


def test_modelmesh_is_told_measured_sizes_only():
    sizes = Sizes()
    sizes.remember_place("s3://b/a/", "a")
    sizes.remember_model(ModelId("m"), "b")
    assert sizes.measured_bytes("s3://b/a", ModelId("m")) is None
    learn(sizes, 300, is_measured=False)
    assert sizes.measured_bytes("s3://b/a", ModelId("m")) is None
    learn(sizes, 200, key="b")
    assert sizes.measured_bytes("s3://b/a", ModelId("m")) == 200 * MIB
    learn(sizes, 300)
    assert sizes.measured_bytes("s3://b/a", ModelId("m")) == 300 * MIB
    assert sizes.measured_bytes("elsewhere", ModelId("other")) is None


def test_package_that_was_used_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    sizes = Sizes()
    for key in ("a", "b", "a", "c"):
        learn(sizes, 300, key=key)
    assert [sizes.find(key) is not None for key in "abc"] == [True, False, True]


def test_sizes_come_back_from_the_file():
    sizes = Sizes(triton_version="2.51")
    learn(sizes, 300)
    learn(sizes, 100, key="b", is_measured=False)
    sizes.remember_place("s3://b/a", "a")
    sizes.remember_place("s3://b/unknown", "unknown")
    sizes.remember_model(ModelId("m"), "b")
    sizes.record_shortage("a", to_bytes({"0": 400}))  # of this run alone
    data = json.loads(json.dumps(sizes.as_dict()))
    other = Sizes(triton_version="2.51")
    assert other.restore(data) == 2
    assert other.as_dict() == data
    assert need_of(other)[:2] == ({"0": 300}, Basis.MEASURED)
    assert need_of(other, key="b")[:2] == ({"0": 100}, Basis.BOOKED)
    assert other.measured_bytes("s3://b/a", ModelId("m")) == 300 * MIB
    assert "s3://b/unknown" not in data["places"]


GOOD = {"key": "a", "triton": "", "bytes": {"0": 1}, "is_measured": True}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"packages": {}},
        {"packages": ["a", None]},
        {"packages": [GOOD | {"key": 1}]},
        {"packages": [GOOD | {"triton": None}]},
        {"packages": [GOOD | {"bytes": [1]}]},
        {"packages": [GOOD | {"bytes": {"0": -1}}]},
        {"packages": [GOOD | {"bytes": {"0": True}}]},
        {"packages": [GOOD | {"is_measured": 1}]},
        {"places": {"s3://b": "unknown"}, "models": []},
    ],
)
def test_foreign_entries_of_the_file_are_left_out(data):
    sizes = Sizes()
    assert sizes.restore(data) == 0
    assert sizes.as_dict() == {"packages": [], "places": {}, "models": {}}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["packages", "places", "models", "key", "triton", "bytes", "is_measured"]
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_file_can_be_read(data):
    sizes = Sizes()
    sizes.restore(data)
    json.dumps(sizes.as_dict())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (2**40, "1.0 TiB"),
        (-(2**30), "-1.0 GiB"),
    ],
)
def test_sizes_are_shown_for_people(count, text):
    assert format_size(count) == text
