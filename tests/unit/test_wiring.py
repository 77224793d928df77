"""Settings reach the parts that they are about, and no part is given another's."""

import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from adapter.app import Adapter
from adapter.app.listeners import Rpc
from adapter.control.models import Models
from adapter.control.on_demand import OnDemand
from adapter.control.ports import StoreSettings, TimeLimits
from adapter.core.record import OnExit
from adapter.core.sizes import SIZE_FACTOR
from adapter.dataplane.http import HttpDataPlane
from adapter.frontends.grpc import modelmesh
from adapter.frontends.grpc.mesh_sizes import MeshSizes
from adapter.frontends.http.calls import Calls
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.sagemaker import SageMaker
from adapter.frontends.http.server import HttpServer
from adapter.frontends.http.v2 import V2
from adapter.frontends.model_repository import Repository
from adapter.frontends.routes import ROUTES
from adapter.runtime.turns import Turns
from adapter.settings import Loaded, Settings, load_settings
from adapter.store.cache import ArtifactCache

TESTS = Path(__file__).parents[1]
Part = TypeVar("Part")

# A value that nothing else has, and the attributes of the adapter's parts that must hold it.
HELD = {
    "load_timeout_seconds": (
        "1234.5",
        {"load", "_load_timeout", "load_seconds"},
    ),
    "infer_timeout_seconds": ("1236.5", {"_timeout", "_seconds"}),
    "drain_min_seconds": ("6.75", {"_min_seconds"}),
    "size_factor": ("1.875", {"size_factor", "_factor"}),
    "max_body_bytes": (
        "1234567",
        {"_max_body", "_max_body_bytes", "max_body_bytes", "max_unpacked"}
        | {"direct", "stream", "unary", "_max_message_bytes"},
    ),
    "load_concurrency": ("87", {"load_concurrency", "count", "_count"}),
    "max_inflight_body_bytes": ("34567891", {"limit"}),
    "memory_limit": ("98765432109", {"limit_bytes"}),
    "modelmesh_default_size": ("567891", {"default_bytes", "mesh_default_bytes"}),
    "modelmesh_capacity": ("9876543210", {"_capacity_bytes"}),
}


# of the adapter, and of grpc what keeps the functions that answer the methods of a service
_FOLLOWED = ("adapter.", "grpc._utilities")


def items_of(held: Any) -> list[object]:
    """Return what a container, or a function with some of its arguments, holds."""
    if isinstance(held, partial):
        return [held.func, *held.args]
    return list(held.values() if isinstance(held, dict) else held)


def parts_of(held: object) -> Iterator[tuple[str, object]]:
    """What an object of the adapter holds, by its name; also in closures, lists and dicts."""
    if isinstance(held, dict | list | tuple | set | frozenset | partial):
        yield from (("", value) for value in items_of(held))
    elif isinstance(held, types.MethodType):
        yield "", held.__self__
    elif isinstance(held, types.FunctionType):
        cells = zip(held.__code__.co_freevars, held.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells)
    elif type(held).__module__.startswith(_FOLLOWED):
        slots = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*getattr(held, "__dict__", ()), *slots):
            if hasattr(held, name):
                yield name, getattr(held, name)


def part(root: object, kind: type[Part]) -> Part:
    """The part of this kind, wherever in the adapter it is."""
    seen, left = {id(root)}, [root]
    while left:
        for _, held in parts_of(left.pop()):
            if isinstance(held, kind):
                return held
            if id(held) not in seen and not isinstance(held, Settings | Loaded | type):
                seen.add(id(held))
                left.append(held)
    raise AssertionError(f"the adapter has no {kind.__name__}")


def numbers_in(root: object) -> dict[float, set[str]]:
    """Each number that is held anywhere, and the names of the attributes that hold it."""
    found: dict[float, set[str]] = {}
    seen, left = {id(root)}, [root]
    while left:
        for name, part in parts_of(left.pop()):
            if isinstance(part, int | float):
                found.setdefault(part, set()).add(name)
            elif id(part) not in seen and not isinstance(part, Settings | Loaded | type):
                seen.add(id(part))
                left.append(part)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[float, set[str]]:
    folder = tmp_path_factory.mktemp("wiring")
    given = {name: text for name, (text, _) in HELD.items()}
    flags = {"triton": "external", "model_roots": [str(folder)], "repository": str(folder)}
    return numbers_in(Adapter(load_settings(flags | given, {}, None)))


@pytest.mark.parametrize("name", HELD)
def test_a_setting_reaches_the_part_that_it_is_about(name, found):
    text, attributes = HELD[name]

    assert found.get(float(text)) == attributes


@dataclass(frozen=True)
class Look:
    """`see` finds in the adapter what `given` makes of it, beside `more` settings."""

    given: object
    see: Callable[[Adapter], object]
    expected: object
    embedded: bool = False


TRITON = "127.0.0.1:4567"

# What is no number.
SEEN = {
    "triton": Look("external", lambda a: a._embedded, None),
    "triton_http": Look(
        TRITON, lambda a: a._embedded._wanted["http"], ("127.0.0.1", 4567), embedded=True
    ),
    "triton_grpc": Look(
        TRITON, lambda a: a._embedded._wanted["grpc"], ("127.0.0.1", 4567), embedded=True
    ),
    "triton_metrics": Look(
        TRITON, lambda a: a._embedded._wanted["metrics"], ("127.0.0.1", 4567), embedded=True
    ),
    "tritonserver": Look(
        "/bin/other", lambda a: a._embedded._binary, Path("/bin/other"), embedded=True
    ),
    "triton_args": Look(
        ["--a", "--b=c"], lambda a: a._embedded._extra_args, ("--a", "--b=c"), embedded=True
    ),
    "start_timeout_seconds": Look(
        "77", lambda a: a._embedded._start_timeout_seconds, 77, embedded=True
    ),
    "staging": Look("copy", lambda a: a._control.models.packages._staging, "copy"),
    "repository": Look("/elsewhere", lambda a: a._repository, Path("/elsewhere")),
    "model_roots": Look(["/a", "/b"], lambda a: a._control.models.packages._roots, ["/a", "/b"]),
    "single_model": Look("/models/one", lambda a: a._single, "one"),
    "gpu_placement": Look(
        "most_free", lambda a: str(a._control.memory.settings.places_gpus), "True"
    ),
    "memory_source": Look("nvml", lambda a: a._reader._wanted, "nvml"),
    "memory_reserve": Look(
        "123MiB", lambda a: a._control.memory.settings.headroom_of(0), 123 * 2**20
    ),
    "on_triton_restart": Look("reload", lambda a: a._control.status.setting, OnExit.RELOAD),
    "oom_patterns": Look(
        ["tank is dry"], lambda a: a._triton._faults._classifier._extra[0].pattern, "tank is dry"
    ),
    # with a second for those who are told that it is over
    "drain_timeout_seconds": Look("21", lambda a: a._listeners._grace_seconds, 22),
    "inline_files": Look("off", lambda a: str(part(a, Repository)._takes_files), "False"),
    "passthrough": Look("log", lambda a: part(a, Calls)._passthrough, {"log"}),
}

# What is read once the adapter runs, or by what is given all settings: the test that sees it.
SHOWN = {
    "endpoint_keys": "journeys/endpoint/test_signed.py::test_a_signed_call_is_answered",
    **dict.fromkeys(
        ("model_store", "endpoints", "cache_dir", "cache_limit"),
        "unit/test_wiring.py::test_stores_and_their_cache_are_as_their_settings_say",
    ),
    "inference_type": (
        "journeys/neighbours/test_generate.py::test_invocations_are_generate_of_the_single_model"
    ),
    "load_at_start": "journeys/sagemaker/test_load_at_start.py"
    "::test_probes_say_ready_when_every_wanted_model_is_loaded",
    "listen_host": (
        "unit/settings/test_settings.py::"
        "test_listeners_are_for_this_machine_alone_unless_the_listen_host_is_another"
    ),
    "http": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "grpc": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "http_data": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "grpc_data": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "admin": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "control_token": "journeys/access/test_control_token.py"
    "::test_a_control_call_over_rest_without_the_token_is_401",
    "metrics": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "allowed_hosts": "frontends/http/test_sites.py::test_on_loopback_its_own_names_are_known",
    **dict.fromkeys(
        (
            *("pin", "preload", "idle_unload_seconds", "model_wait_seconds", "on_demand"),
            "revalidate_seconds",
        ),
        "unit/test_wiring.py::test_models_on_demand_are_as_their_settings_say",
    ),
    "modelmesh_model_concurrency": (
        "frontends/grpc/modelmesh/test_load.py::test_a_model_is_told_with_its_limit"
    ),
    "log_level": "unit/test_wiring.py::test_the_log_is_as_its_settings_say",
    "log_format": "unit/test_wiring.py::test_the_log_is_as_its_settings_say",
    "warm_up": "packages/test_warm_up.py::"
    "test_a_model_has_computed_zeros_before_its_load_is_answered",
}


def test_the_effect_of_every_setting_is_looked_at():
    looked_at = [*HELD, *SEEN, *SHOWN]
    assert sorted(looked_at) == sorted(Settings.model_fields)
    for test in SHOWN.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8")


def test_stores_and_their_cache_are_as_their_settings_say(tmp_path):
    flags = {
        "model_store": "/models",
        "endpoints": ["team=/team"],
        "cache_dir": str(tmp_path),
        "cache_limit": "3GiB",
    }
    cache = part(Adapter(load_settings(flags, {}, None)), ArtifactCache)
    assert {name: str(each.store.location) for name, each in cache._versions.items()} == {
        "": "/models",
        "team": "/team",
    }
    assert (cache.root, cache.limit_bytes) == (tmp_path, 3 * 2**30)


@pytest.mark.parametrize("on_demand", [True, False])
def test_models_on_demand_are_as_their_settings_say(tmp_path, on_demand):
    flags = {
        "model_store": "/models",
        "cache_dir": str(tmp_path),
        "on_demand": on_demand,
        "pin": ["a*"],
        "preload": ["b.zip"],
        "idle_unload_seconds": "71.5",
        "model_wait_seconds": "72.5",
        "load_concurrency": "7",
        "revalidate_seconds": "73.5",
    }
    adapter = Adapter(load_settings(flags, {}, None))
    settings = part(adapter, StoreSettings)
    assert settings.pin == ("a*",)
    assert (settings.idle_unload_seconds, settings.revalidate_seconds) == (71.5, 73.5)
    assert settings.load_concurrency == 7
    assert part(adapter, TimeLimits).model_wait == 72.5
    assert str(adapter._control.key_of(adapter._settings.preload[0])) == "b.zip"
    served = part(adapter, ContainerContracts).v2._wait_for_lease.__self__
    assert isinstance(served, OnDemand if on_demand else Models)


def test_all_that_takes_long_on_the_event_loop_shares_its_turns():
    adapter = Adapter(load_settings({}, {}, None))
    kinds = (HttpServer, HttpDataPlane, Rpc)
    assert len({id(part(part(adapter, kind), Turns)) for kind in kinds}) == 1


def test_the_limit_of_mps_in_the_environment_reaches_memory(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=4G")
    adapter = Adapter(load_settings({"memory_limit": "8GiB"}, {}, None))
    assert adapter._control.memory.settings.process_limits == {0: 4 * 2**30}


def test_by_default_a_mesh_loads_one_model_at_once_and_calls_load_two(tmp_path):
    adapter = Adapter(load_settings({"model_store": "/m", "cache_dir": str(tmp_path)}, {}, None))
    assert part(adapter, modelmesh.Options).load_concurrency == 1
    assert part(adapter, StoreSettings).load_concurrency == 2


@pytest.mark.parametrize("name", SEEN)
async def test_a_setting_is_what_its_part_goes_by(name, tmp_path):
    look = SEEN[name]
    flags = {"model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    kind = "embedded" if look.embedded else "external"
    adapter = Adapter(load_settings({"triton": kind} | flags | {name: look.given}, {}, None))
    try:
        assert look.see(adapter) == look.expected
    finally:
        if adapter._embedded is not None:
            await adapter._embedded.stop()


async def test_each_listener_is_where_its_setting_says(tmp_path):
    names = ("http", "http_data", "grpc", "grpc_data", "admin", "metrics")
    listeners = {name: f"unix:{tmp_path / name}.sock" for name in names}
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    adapter = Adapter(load_settings(flags | listeners, {}, None))
    await adapter._open_listeners()
    try:
        assert adapter.addresses == listeners
        assert all((tmp_path / f"{name}.sock").is_socket() for name in listeners)
    finally:
        await adapter._listeners.close()
        await adapter._listeners.close_probes()


async def test_every_http_listener_plans_inferences_once_triton_is_known(tmp_path):
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    settings = load_settings(flags | {"http_data": f"unix:{tmp_path}/data"}, {}, None)
    adapter = Adapter(settings)
    adapter._connect("127.0.0.1:4567", "127.0.0.1:4568")
    assert {rest.name: rest.heads.host for rest in adapter._rest} == {
        "http": "127.0.0.1:4567",
        "http_data": "127.0.0.1:4567",
    }


def test_every_http_listener_renews_its_connections_while_unready(tmp_path):
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    settings = load_settings(flags | {"http_data": f"unix:{tmp_path}/data"}, {}, None)
    adapter = Adapter(settings)
    renewed = [rest.listener.renew_connections for rest in adapter._rest]
    assert len(renewed) == 2
    assert adapter._unready._end_connections == renewed


@pytest.mark.parametrize(("kind", "contract"), [(SageMaker, "sagemaker"), (V2, "v2")])
def test_every_call_of_the_table_has_a_handler_and_no_other(tmp_path, kind, contract):
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    adapter = Adapter(load_settings(flags, {}, None))

    operations = {route.operation for route in ROUTES if route.contract == contract}
    assert set(part(adapter, kind).handlers) == operations


@pytest.mark.slow
def test_the_log_is_as_its_settings_say(tmp_path):
    """Of a start that fails for want of a Triton: errors for people, and nothing of less weight."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens to nobody
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [
            *("--log-level=error", "--log-format=text", "--start-timeout-seconds=0.1"),
            *(f"--triton-http={nobody}", f"--triton-grpc={nobody}", f"--repository={tmp_path}"),
            *(f"--grpc=unix:{tmp_path}/grpc.sock", "--http=off", "--admin=off"),
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "adapter", "serve", *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert any("Triton was not live" in line for line in lines), ended
    assert not [line for line in lines if line.startswith("{") or "adapter.listening" in line]


def test_the_default_size_factor_is_by_backend():
    adapter = Adapter(load_settings({"memory_limit": "8GiB"}, {}, None))
    assert adapter._control.memory.ledger.sizes.size_factor is None
    assert part(adapter, MeshSizes)._factor == SIZE_FACTOR
