"""Models whose `initialize` never returns: an unload or the time limit ends their loads."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from adapter.core import times
from tests.asking import background, model_names, triton_index
from tests.constants import UNLOAD
from tests.journeys.memory.models import check_agreement, write_eater
from tests.processes import stubs, tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

_FOREVER = """\
import time
while True:
    time.sleep(1)
"""
_ENDED_SECONDS = 5  # a DELETE of a load that hangs
_SLOW_SECONDS = 60
_LONGER_SECONDS = 2  # twice the load as well: it may meet a busy moment


@pytest.fixture(scope="module")
def running(model_root) -> Iterator[RunningAdapter]:
    """An adapter whose Triton completes configurations."""
    with embedded_adapter(f"--model-roots={model_root}") as adapter:
        yield adapter
        assert adapter.events("model.load_stuck") == adapter.events("triton.ended") == []


def write_hanging(folder: Path) -> Path:
    return write_eater(folder, 1, initialize=_FOREVER)


def begin_hanging(adapter: RunningAdapter, others, name: str, package: Path):
    asked = others.ask(lambda client: client.load(name, package))
    # without an instance's name while it completes the configuration
    wait_until(lambda: serves(adapter, name), 60, f"Triton initializes {name}")
    return asked


def serves(adapter: RunningAdapter, name: str) -> bool:
    found = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in stubs(adapter, name)]
    return any(
        f"\0{name}_0_0\0".encode() in each or f"\0{name}_0\0".encode() in each for each in found
    )


def timed(act) -> float:
    begun = time.monotonic()
    assert act().status == 200
    return time.monotonic() - begun


def check_serving(adapter: RunningAdapter, client: Client, *names: str) -> None:
    assert model_names(client) == [*names]
    for name in names:
        assert client.invoke(name).status == 200
    check_agreement(adapter)


def test_unload_ends_a_hanging_load_without_trace(adapter, client, package):
    write_hanging(package)
    with background(adapter) as others:
        for _ in range(2):  # as well the second time
            asked = begin_hanging(adapter, others, "m", package)
            assert timed(lambda: client.unload("m")) < _ENDED_SECONDS
            reply = asked.result()
            assert (reply.status, reply.code) == (409, "UnloadedMeanwhile")
            assert "was unloaded while it was being loaded" in reply.error
            assert stubs(adapter, "m") == []
            assert client.get("/models/m").status == 404
            check_agreement(adapter)


def test_unload_of_dead_model_ends_despite_hang(adapter, client, package, tmp_path):
    """Triton lets go of a dead model by a load of the same name (docs/design/triton.md)."""
    flag = tmp_path / "hangs"
    hangs = f"while os.path.exists({str(flag)!r}):\n    time.sleep(0.01)\n"
    write_eater(package, 1, imports="import os, time", initialize=hangs)
    client.load_model("m", package)
    flag.touch()
    for pid in stubs(adapter, "m"):
        os.kill(pid, signal.SIGKILL)
    assert timed(lambda: client.unload("m")) < 2 * _ENDED_SECONDS
    assert stubs(adapter, "m") == []
    check_agreement(adapter)
    flag.unlink()
    client.load_model("m", package)
    check_serving(adapter, client, "m")


def test_load_beside_hanging_ones_waits_once(adapter, client, package):
    """Loads of unknown size are measured one by one, and the next one waits for 5 s at most."""
    hanging, sound = write_hanging(package / "hanging"), write_eater(package / "sound", 1)
    more = [write_eater(package / f"sound{n}", 30) for n in range(2)]
    with background(adapter) as others:
        without = timed(lambda: client.load("before", sound))
        asked = [begin_hanging(adapter, others, name, hanging) for name in ("m0", "m1")]
        names = [f"beside{number}" for number in range(2)]  # of unknown size, as the hanging one is
        beside = [
            timed(lambda p=p, n=n: client.load(n, p)) for n, p in zip(names, more, strict=True)
        ]
        for name in ("m0", "m1"):
            assert timed(partial(client.unload, name)) < _ENDED_SECONDS
        longest = 2 * without + _LONGER_SECONDS
        assert beside[0] < longest + times.MEMORY_SECONDS, (without, beside)
        assert beside[1] < longest, (without, beside)
        assert [each.result().status for each in asked] == [409, 409]
        check_serving(adapter, client, "before", "beside0", "beside1")


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_five_slow_first_loads_at_once_are_answered(adapter, client, package):
    """Triton has four load threads, so the fifth begins when one of the others hangs or ends."""
    names = [f"slow{number}" for number in range(5)]
    statements = f"import time\ntime.sleep({_SLOW_SECONDS})\n"
    for name in names:
        write_eater(package / name, 20, imports=f"# {name}", initialize=statements)

    def load(name: str) -> int:
        with adapter.client(timeout=300) as own:
            return own.load(name, package / name).status

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(load, names)) == [200] * 5
    check_serving(adapter, client, *names)


@pytest.mark.nightly
def test_four_hanging_loads_cost_no_loaded_model(tmp_path):
    """Triton has four threads for loads. Each load is ended by its time limit."""
    hanging, sound = write_hanging(tmp_path / "hanging"), write_eater(tmp_path / "sound", 1)
    names = {f"m{number}" for number in range(4)}
    with (
        embedded_adapter(f"--model-roots={tmp_path}", "--load-timeout-seconds=12") as adapter,
        adapter.client() as client,
        background(adapter, 6) as others,
    ):
        client.load_model("before", sound)
        server = tritonserver(adapter)
        asked = [others.ask(lambda c, n=n: c.load(n, hanging)) for n in names]
        hung = set[str]()  # the first may be ended before the last has begun

        def all_have_hung() -> bool:
            hung.update(name for name in names if serves(adapter, name))
            return hung == names

        wait_until(all_have_hung, 60, "all four hang")
        fifth = others.ask(lambda c: c.load("fifth", sound))
        assert [each.result().status for each in asked] == [504] * 4
        if fifth.result().status != 200:  # its time was over as well
            wait_until(lambda: client.get("/models/fifth").status == 404, 30, "it is undone")
            client.load_model("fifth", sound)
        wait_until(lambda: set(triton_index(adapter).values()) == {"READY"}, 30, "nothing is left")
        check_serving(adapter, client, "before", "fifth")
        assert tritonserver(adapter) == server
        assert adapter.events("model.load_stuck") == adapter.events("triton.ended") == []
        assert {line["model_id"] for line in adapter.events("model.load_ended")} >= names


def test_load_hanging_at_import_is_ended_later(tmp_path, gate):
    """To kill it before would cost a thread for good (docs/design/triton.md)."""
    folder = tmp_path / "hanging"
    package = write_eater(folder, 1, imports=gate.statements, initialize=_FOREVER)
    with (
        embedded_adapter(f"--model-roots={tmp_path}", constants={UNLOAD: 3}) as adapter,
        adapter.client() as client,
        background(adapter) as others,
    ):
        asked = others.ask(lambda c: c.load("m", package))
        gate.wait_reached()
        reply = client.unload("m")
        assert (reply.status, reply.code) == (504, "BackendTimeout")
        assert "Triton has been loading it for" in reply.error
        assert asked.result().status == 409
        assert stubs(adapter, "m") != []
        gate.open()
        wait_until(lambda: stubs(adapter, "m") == [], 30, "its process is killed")
        wait_until(lambda: triton_index(adapter) == {}, 30, "it is cleared away")
        check_agreement(adapter)


def check_unloads_at_moments(
    adapter: RunningAdapter, client: Client, package: Path, *moments: float
) -> None:
    """Triton never ends a load whose process is killed as it starts, nor its unload amid which it
    is killed.
    """
    write_eater(package, 1)
    with background(adapter) as others:
        for seconds in moments:
            asked = others.ask(lambda c: c.load("m", package))
            time.sleep(seconds)
            assert client.unload("m").status in {200, 404}
            assert asked.result().status in {200, 409}
            client.unload("m")
        wait_until(lambda: "m" not in triton_index(adapter), 30, "nothing is left")
        check_agreement(adapter)
        assert stubs(adapter, "m") == []
        assert adapter.events("model.load_stuck") == []


def test_quickly_unloaded_load_costs_no_thread(adapter, client, package):
    check_unloads_at_moments(adapter, client, package, 0.1, 0.3, 0.6)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), (COMPLETE,)])
def test_load_unloaded_at_any_moment_leaves_nothing(tmp_path, flags):
    """It costs no thread of Triton."""
    with (
        embedded_adapter(f"--model-roots={tmp_path}", *flags) as adapter,
        adapter.client() as client,
    ):
        moments = [tenths / 10 for tenths in range(12)]
        check_unloads_at_moments(adapter, client, tmp_path / "sound", *moments)
