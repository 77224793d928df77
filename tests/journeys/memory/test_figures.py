"""The figures and texts that users read: what is a bound, what is free, and of which device."""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout

import pytest

from adapter.cli.main import main
from tests.asking import model_names
from tests.journeys.memory.failing_models import failing, write_failing_answers
from tests.journeys.memory.models import MIB, write_eater
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_LIMIT = 500 * MIB
# less than a glance at a busy host differs from the next one
_NOISE = 20 * MIB
# grows to 1.3 GiB, and stays there until its load is ended
_GROWS = """
import time
self.parts = []
for _ in range(70):
    self.parts.append(numpy.ones(18 * 2**20, numpy.uint8))
    time.sleep(0.1)
time.sleep(3600)
"""
_CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(scope="module")
def running(root, tmp_path_factory) -> Iterator[RunningAdapter]:
    """An adapter of 500 MiB of host memory, with a folder of models as its store."""
    store = tmp_path_factory.mktemp("store")
    write_failing_answers(store / "raiser")
    write_python_model(store / "healthy")
    flags = ("--memory-source=host", f"--memory-limit={_LIMIT}", f"--model-store={store}")
    cache = f"--cache-dir={tmp_path_factory.mktemp('cache')}"
    with embedded_adapter(*flags, cache, COMPLETE, f"--model-roots={root}") as adapter:
        yield adapter


def print_ps(adapter: RunningAdapter) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["ps", f"--admin={adapter.admin}"], {}) == 0
    return printed.getvalue()


def test_load_that_was_ended_names_a_bound(adapter, client, root):
    """Nobody has seen how much it would have taken: who frees that much would fail again."""
    client.load_model("first", write_eater(root / "first", 150))
    greedy = write_eater(root / "greedy", 1, initialize=_GROWS)

    ended = client.load("greedy", greedy).json()
    refused = client.load("greedy", greedy).json()
    again = client.load("greedy", greedy).json()

    bound_bytes = ended["needs_more_than_bytes"]
    assert bound_bytes == ended["needed_bytes"]
    assert "needs more than" in ended["error"]
    assert "and was unloaded" in ended["error"]
    for body in (refused, again):
        assert body["code"] == "InsufficientMemory", body
        # the reservation may have grown by another reading before the load was gone
        assert bound_bytes <= body["needs_more_than_bytes"] < bound_bytes + 200 * MIB
        assert body["needs_more_than_bytes"] <= body["needed_bytes"]
        assert "needs more than" in body["error"]
    # free bytes never count the reserve
    assert ended["free_bytes"] == pytest.approx(refused["free_bytes"], abs=_NOISE)
    assert ended["limit_bytes"] == refused["limit_bytes"] == _LIMIT
    device = adapter.state()["memory"]["devices"]["host"]
    assert refused["free_bytes"] == pytest.approx(device["free_bytes"], abs=_NOISE)

    assert "3 failures, the last: InsufficientMemory: model 'greedy' needs more than" in print_ps(
        adapter
    )


def test_load_that_ended_names_what_it_took(client, root):
    """A size that a reading has shown is no bound."""
    client.load_model("first", write_eater(root / "quick-first", 320))
    quick = write_eater(root / "quick", 200, declares="1KiB")
    for _ in range(2):
        body = client.load("quick", quick).json()
        assert body["code"] == "InsufficientMemory", body
        has_bound = body["needs_more_than_bytes"] is not None
        assert ("more than" in body["error"]) is has_bound


def test_declared_size_that_was_passed_is_raised(client, root):
    """Else the platform is told to free what was seen to be too little."""
    client.load_model("first", write_eater(root / "declared-first", 150))
    liar = write_eater(root / "liar", 1, initialize=_GROWS, declares="70MiB")
    ended = client.load("liar", liar).json()
    refused = client.load("liar", liar).json()
    assert ended["needs_more_than_bytes"] > 100 * MIB
    assert refused["code"] == "InsufficientMemory", refused
    assert refused["needed_bytes"] >= ended["needs_more_than_bytes"]


def test_declared_size_above_device_tells_free_memory(adapter, client, root):
    huge = write_eater(root / "huge", 1, declares="600MiB")
    body = client.load("huge", huge).json()
    device = adapter.state()["memory"]["devices"]["host"]
    assert body["code"] == "ModelTooLarge"
    assert body["free_bytes"] == pytest.approx(device["free_bytes"], abs=_NOISE)
    assert body["needs_more_than_bytes"] is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("RuntimeError", _CUDA),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
        ("RuntimeError", "CUDA out of memory"),
        ("MemoryError", "Unable to allocate 3.00 MiB for an array"),
        ("MemoryError", ""),
    ],
)
def test_words_of_an_inference_evict_nothing(adapter, client, kind, text):
    """Nothing lacks room: no other model is evicted for it, nor the model for itself."""
    assert client.call_endpoint("raiser", failing("answer", "fine")).status == 200
    assert client.call_endpoint("healthy").status == 200
    before = adapter.state()
    for _ in range(3):
        assert client.call_endpoint("raiser", failing(kind, text)).status >= 400
    after = adapter.state()
    assert sorted(model_names(client)) == ["healthy", "raiser"]
    loaded = [
        {model["model_id"]: model["triton_name"] for model in state["models"]}
        for state in (before, after)
    ]
    assert loaded[0] == loaded[1]
    assert after["on_demand"]["evictions"].get("room", 0) == 0
    assert "evicted" not in print_ps(adapter)


def test_inference_that_asks_for_too_much_evicts_nothing(client, root):
    """All that may be evicted is too little for it."""
    client.load_model("explicit", write_eater(root / "explicit", 200))
    assert client.call_endpoint("raiser", failing("answer", "fine")).status == 200
    assert client.call_endpoint("healthy").status == 200
    text = "Unable to allocate 480 MiB for an array"
    assert client.call_endpoint("raiser", failing("MemoryError", text)).status >= 400
    assert sorted(model_names(client)) == ["explicit", "healthy", "raiser"]


def test_load_whose_words_are_refuted_is_tried_again(client, root):
    """Ten times of what it asked for was free: that it can never fit is not proven."""
    flag = root / "has-weights"
    flaky = write_python_model(
        root / "flaky",
        imports="import os",
        initialize=(
            f"if not os.path.exists({str(flag)!r}):\n"
            "    raise MemoryError('Unable to allocate 1.00 MiB for an array')"
        ),
    )
    for _ in range(2):
        refused = client.load("flaky", flaky)
        assert (refused.status, refused.code) == (507, "OutOfMemory"), refused.body
    flag.touch()
    client.load_model("flaky", flaky)
