"""Tests with real CUDA memory, run by `make test-gpu`: docs/measurements.md, GPUs."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.models import MIB, book, gpu, why_not, write_cuda_model
from tests.journeys.memory.models import metric
from tests.processes import stubs
from tests.running import Client, Reply, RunningAdapter, wait_until
from tests.trees import infer_body, write_python_model

_MISSING = why_not()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "there is one"),
    pytest.mark.timeout(400),
]

_FIT = 4  # models of the size below, and no fifth
_SHARE = 0.22


def big() -> int:
    """MiB of which the free memory has room for four."""
    return int(gpu().free * _SHARE) // MIB


def out_of_memory(reply: Reply, code: str) -> dict[str, Any]:
    body = reply.json()
    assert (reply.status, body["code"]) == (507, code), body
    return body


def held(adapter: RunningAdapter) -> dict[str, int]:
    return {m["model_id"]: sum(m["bytes"].values()) for m in adapter.state()["models"]}


def recovery_seconds(adapter: RunningAdapter) -> float:
    """For how long unloads have waited for memory, in all."""
    return metric(adapter, "triton_adapter_memory_recovery_seconds_sum")


def test_one_eviction_heals_cuda_out_of_memory(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    """Five packages of which nothing is known: each is tried."""
    mebibytes = big()
    packages = [write_cuda_model(root / f"tried{n}", mebibytes) for n in range(_FIT + 1)]
    statuses = [client.load(p.name, p).status for p in packages[:_FIT]]
    assert statuses == [200] * _FIT

    body = out_of_memory(client.load("tried4", packages[_FIT]), "OutOfMemory")

    assert "out of memory" in body["matched"].lower()
    assert body["needed_bytes"] == pytest.approx(mebibytes * MIB, rel=0.01)
    assert body["free_bytes"] < body["needed_bytes"]
    assert sorted(held(adapter)) == [p.name for p in packages[:_FIT]]
    before, begun = gpu().used, time.monotonic()
    assert client.delete("/models/tried1").status == 200
    record_property("delete_seconds", round(time.monotonic() - begun, 3))
    assert before - gpu().used >= 0.75 * mebibytes * MIB  # before the answer, not after it
    assert client.load("tried4", packages[_FIT]).status == 200


def test_learned_size_refuses_with_the_drivers_figures(
    adapter: RunningAdapter, client: Client, root: Path
) -> None:
    package = write_cuda_model(root / "learned", big())
    assert [client.load(name, package).status for name in "abcd"] == [200] * _FIT

    body = out_of_memory(client.load("e", package), "InsufficientMemory")

    seen = gpu()
    assert body["free_bytes"] == pytest.approx(seen.free, abs=0.02 * seen.total)
    assert body["limit_bytes"] == pytest.approx(seen.total, rel=0.02)
    assert client.delete("/models/a").status == 200
    assert client.load("e", package).status == 200


def test_learned_size_predicts_within_a_tenth(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    package = write_cuda_model(root / "twice", 2048)
    assert client.load("first", package).status == 200
    learned = held(adapter)["first"]
    assert client.delete("/models/first").status == 200
    before = gpu().used

    assert client.load("second", package).status == 200

    taken = gpu().used - before
    record_property("context_mib", (taken >> 20) - 2048)
    assert learned == pytest.approx(taken, rel=0.1)
    assert learned >= 2048 * MIB


def test_ledger_is_within_a_twentieth_of_the_driver(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    for number, mebibytes in enumerate((1024, 4096, 8192)):
        package = write_cuda_model(root / f"mixed{number}", min(mebibytes, big() // 2))
        assert client.load(package.name, package).status == 200

    booked = book(adapter)

    sum_bytes = booked["empty_bytes"] + booked["used_by_models_bytes"]
    used = gpu().used
    record_property("ledger_over_driver", round(sum_bytes / used, 4))
    assert sum_bytes == pytest.approx(used, rel=0.05)
    assert booked["used_by_models_bytes"] == sum(held(adapter).values())


def test_memory_is_back_after_each_of_ten_unloads(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    package, seconds = write_cuda_model(root / "again", 4096), []
    empty = gpu().used
    for _ in range(10):
        assert client.load("again", package).status == 200
        begun = time.monotonic()
        assert client.delete("/models/again").status == 200
        seconds.append(round(time.monotonic() - begun, 3))
        assert gpu().used - empty < 0.25 * 4096 * MIB
    record_property("unload_seconds", seconds)
    assert book(adapter)["used_by_models_bytes"] == 0


def test_inference_out_of_memory_is_507_then_serves(client: Client, root: Path) -> None:
    package = write_cuda_model(root / "eater", 512)
    assert client.load("eater", package).status == 200
    wanted = gpu().free // MIB + 1024

    body = out_of_memory(
        client.post("/models/eater/invoke", infer_body(float(wanted))), "OutOfMemory"
    )

    assert body["needed_bytes"] == pytest.approx(wanted * MIB, rel=0.01)
    assert client.post("/models/eater/invoke", infer_body(16.0)).status == 200


def test_load_without_room_for_context_is_507(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    """With more free than a load of unknown size needs to be tried, and less than a context."""
    rest = "x = torch.cuda.mem_get_info()[0] - 200 * 2**20"
    filler = write_python_model(
        root / "filler",
        imports="import torch",
        initialize=f"{rest}\nself.held = torch.empty(x, dtype=torch.uint8, device='cuda')",
    )
    assert client.load("filler", filler).status == 200

    body = out_of_memory(
        client.load("no_room", write_cuda_model(root / "no_room", 1)), "OutOfMemory"
    )

    record_property("words_without_room", body["error"].partition("Internal: ")[2][:80])
    assert client.delete("/models/filler").status == 200
    assert client.load("no_room", root / "no_room").status == 200


def test_concurrent_loads_are_each_measured(
    adapter: RunningAdapter, root: Path, record_property: Any
) -> None:
    asked = {f"at_once{n}": 64 * (n + 1) for n in range(4)}
    packages = [write_cuda_model(root / name, mebibytes) for name, mebibytes in asked.items()]

    def load(package: Path) -> int:
        with closing(adapter.client(300)) as own:
            return own.load(package.name, package).status

    with ThreadPoolExecutor(len(packages)) as pool:
        assert list(pool.map(load, packages)) == [200] * len(packages)

    beside = {name: (count >> 20) - asked[name] for name, count in held(adapter).items()}
    record_property("contexts_mib", beside)
    assert max(beside.values()) - min(beside.values()) < 32


def test_killed_process_returns_memory_and_reloads(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    """Without a wait for memory that was back long ago: the recovery counts hardly any time."""
    package, empty = write_cuda_model(root / "killed", 4096), gpu().used
    assert client.load("killed", package).status == 200
    begun = time.monotonic()
    for pid in stubs(adapter, "killed"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gpu().used - empty < 0.25 * 4096 * MIB, 10, "the memory is back")
    record_property("back_after_kill_seconds", round(time.monotonic() - begun, 3))
    assert client.post("/models/killed/invoke", infer_body(1.0)).status == 500

    waited, begun = recovery_seconds(adapter), time.monotonic()
    assert client.load("killed", package).status == 200

    record_property("load_again_seconds", round(time.monotonic() - begun, 3))
    assert recovery_seconds(adapter) - waited < 2


def test_growth_belongs_to_no_model(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    """A model is booked with what its load took; what it grows by is shown beside the models."""
    package = write_cuda_model(root / "grown", 1024)
    assert client.load("grown", package).status == 200
    booked = held(adapter)["grown"]
    assert client.post("/models/grown/invoke", infer_body(8192.0)).status == 200  # torch keeps it
    wait_until(lambda: book(adapter)["not_attributed_bytes"] > 7000 * MIB, 15, "the growth is read")
    assert held(adapter)["grown"] == booked

    waited, begun = recovery_seconds(adapter), time.monotonic()
    assert client.delete("/models/grown").status == 200

    record_property("delete_after_growth_seconds", round(time.monotonic() - begun, 3))
    assert recovery_seconds(adapter) - waited < 2
    wait_until(lambda: book(adapter)["not_attributed_bytes"] < 1000 * MIB, 15, "the growth is back")


def test_model_larger_than_its_device_is_too_large(client: Client, root: Path) -> None:
    """The refusal comes at once, as nothing else is loaded that could be unloaded for it."""
    package = write_cuda_model(root / "huge", gpu().total // MIB + 1024)

    replies = [client.load("huge", package) for _ in range(2)]

    assert [(r.status, r.json()["code"]) for r in replies] == [(400, "ModelTooLarge")] * 2


def test_model_that_never_fits_alone_is_too_large(client: Client, root: Path) -> None:
    """Not larger than the device, but than what the driver and its context leave of it."""
    package = write_cuda_model(root / "tight", gpu().free // MIB - 16)

    reply = client.load("tight", package)

    body = reply.json()
    assert (reply.status, body["code"]) == (400, "ModelTooLarge"), body
    assert body["needed_bytes"] <= body["limit_bytes"]
    assert body["limit_bytes"] == pytest.approx(gpu().total, rel=0.02)
