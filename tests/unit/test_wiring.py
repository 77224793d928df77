"""Each setting has its effect: shown by a call, or seen in the adapter's parts."""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from adapter.app import Adapter
from adapter.app.listeners import Rpc
from adapter.control.ports import StoreSettings, TimeLimits
from adapter.frontends.grpc import modelmesh
from adapter.frontends.grpc.mesh_sizes import MeshSizes
from adapter.frontends.http.sagemaker import SageMaker
from adapter.frontends.http.server import HttpServer
from adapter.frontends.http.v2 import V2
from adapter.frontends.routes import ROUTES
from adapter.runtime.turns import Turns
from adapter.settings import Loaded, Settings, load_settings
from adapter.triton.http import HttpDataPlane

TESTS = Path(__file__).parents[1]
Part = TypeVar("Part")

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


@dataclass(frozen=True)
class Look:
    """`see` finds in the adapter what `given` makes of it, beside `more` settings."""

    given: object
    see: Callable[[Adapter], object]
    expected: object
    embedded: bool = False


TRITON = "127.0.0.1:4567"
# What no call shows.
SEEN = {
    "triton_http": Look(
        TRITON, lambda a: a.parts.embedded._wanted["http"], ("127.0.0.1", 4567), embedded=True
    ),
    "triton_grpc": Look(
        TRITON, lambda a: a.parts.embedded._wanted["grpc"], ("127.0.0.1", 4567), embedded=True
    ),
    "triton_metrics": Look(
        TRITON, lambda a: a.parts.embedded._wanted["metrics"], ("127.0.0.1", 4567), embedded=True
    ),
    "tritonserver": Look(
        "/bin/other", lambda a: a.parts.embedded._binary, Path("/bin/other"), embedded=True
    ),
    "gpu_placement": Look(
        "most_free", lambda a: str(a.parts.control.memory.settings.places_gpus), "True"
    ),
    "memory_source": Look("nvml", lambda a: a.parts.memory._wanted, "nvml"),
    "memory_reserve": Look(
        "123MiB", lambda a: a.parts.control.memory.settings.headroom_of(0), 123 * 2**20
    ),
    "oom_patterns": Look(
        ["tank is dry"],
        lambda a: a.parts.triton._faults._classifier._extra[0].pattern,
        "tank is dry",
    ),
    "size_factor": Look(
        "1.875",
        lambda a: (a.parts.control.memory.ledger.sizes.size_factor, part(a, MeshSizes)._factor),
        (1.875, 1.875),
    ),
    "modelmesh_default_size": Look(
        "567891",
        lambda a: (
            a.parts.control.memory.settings.mesh_default_bytes,
            part(a, MeshSizes).default_bytes,
        ),
        (567891, 567891),
    ),
    "modelmesh_capacity": Look(
        "9876543210", lambda a: part(a, MeshSizes)._capacity_bytes, 9876543210
    ),
    "model_wait_seconds": Look("72.5", lambda a: part(a, TimeLimits).model_wait, 72.5),
}
# The test that shows the effect of each other setting.
SHOWN = {
    "triton": ("journeys/memory/test_restarts.py::test_restarted_adapter_serves_what_was_loaded"),
    "triton_args": (
        "journeys/access/test_triton_port.py::test_restriction_in_triton_args_replaces_the_own"
    ),
    "start_timeout_seconds": "journeys/sagemaker/test_lifecycle.py"
    "::test_start_without_triton_ends_at_its_limit",
    "staging": "journeys/v2/test_uploading.py::test_a_model_is_loaded_invoked_listed_and_unloaded",
    "repository": (
        "journeys/memory/test_restarts.py::test_restarted_adapter_serves_what_was_loaded"
    ),
    "model_roots": (
        "journeys/sagemaker/test_load.py::test_a_path_outside_the_model_roots_is_refused"
    ),
    "single_model": "journeys/sagemaker/test_single_model.py"
    "::test_the_single_model_is_served_at_invocations",
    "on_triton_restart": "journeys/sagemaker/test_ends_again.py"
    "::test_models_return_when_triton_ends_twice",
    "load_timeout_seconds": "journeys/sagemaker/test_timeouts.py"
    "::test_slow_load_is_504_and_taken_down",
    "infer_timeout_seconds": (
        "journeys/sagemaker/test_leaving.py::test_abandoned_requests_refuse_no_others"
    ),
    "drain_timeout_seconds": (
        "journeys/sagemaker/test_sigterm.py::test_requests_in_flight_learn_of_the_end"
    ),
    "drain_min_seconds": "journeys/observability/test_drain.py"
    "::test_sigterm_under_load_loses_no_answer",
    "max_body_bytes": "journeys/sagemaker/test_bodies.py"
    "::test_body_over_the_limit_is_refused_unsent",
    "max_inflight_body_bytes": (
        "attack/test_bodies.py::test_large_call_is_answered_beside_endless_calls"
    ),
    "load_concurrency": "journeys/endpoint/test_turns.py::test_cold_start_waits_for_one_load",
    "memory_limit": "journeys/memory/test_first_loads.py"
    "::test_model_larger_than_all_memory_never_fits",
    "inline_files": (
        "journeys/access/test_inline_files.py::test_files_over_rest_are_403_with_a_reason"
    ),
    "passthrough": "journeys/v2/test_parity.py::test_trace_settings_go_by_the_callers_name",
    "endpoint_keys": "journeys/endpoint/test_signed.py::test_a_signed_call_is_answered",
    "model_store": ("journeys/endpoint/test_store.py::test_bucket_models_survive_a_killed_adapter"),
    "endpoints": "journeys/endpoint/test_endpoints.py::test_each_endpoint_has_models_of_its_own",
    "cache_dir": "journeys/endpoint/test_store.py::test_second_adapter_of_one_cache_is_refused",
    "cache_limit": "journeys/endpoint/test_too_large.py"
    "::test_too_large_model_unloads_nobody_until_changed",
    "pin": "journeys/endpoint/test_not_started.py"
    "::test_another_machine_may_serve_what_cannot_evict",
    "preload": "journeys/endpoint/test_residency.py"
    "::test_preload_models_are_loaded_before_readiness",
    "on_demand": "journeys/endpoint/test_residency.py::test_without_on_demand_v2_loads_nothing",
    "revalidate_seconds": "journeys/endpoint/test_versions.py"
    "::test_new_version_replaces_loaded_one_without_gap",
    "idle_unload_seconds": "journeys/endpoint/test_versions.py"
    "::test_model_kept_during_renewal_stays_uncalled",
    "inference_type": (
        "journeys/neighbours/test_generate.py::test_invocations_are_generate_of_the_single_model"
    ),
    "load_at_start": "journeys/sagemaker/test_load_at_start.py"
    "::test_probes_are_ready_with_every_wanted_model",
    "listen_host": (
        "unit/settings/test_settings.py::test_listeners_are_local_unless_listen_host_differs"
    ),
    "http": "journeys/v2/test_ip_families.py::test_each_listener_answers_over_both_families",
    "grpc": "journeys/v2/test_ip_families.py::test_each_listener_answers_over_both_families",
    "admin": "journeys/v2/test_ip_families.py::test_each_listener_answers_over_both_families",
    "http_data": (
        "journeys/access/test_http_data.py::test_inference_health_and_metadata_are_as_at_http"
    ),
    "grpc_data": "journeys/access/test_triton_input.py"
    "::test_grpc_data_serves_inference_alone_with_passthrough",
    "metrics": "journeys/access/test_metrics_listener.py"
    "::test_metrics_listener_has_only_metrics_and_probes",
    "control_token": "journeys/access/test_control_token.py"
    "::test_rest_control_call_without_token_is_401",
    "allowed_hosts": "frontends/http/test_sites.py::test_on_loopback_its_own_names_are_known",
    "modelmesh_model_concurrency": (
        "frontends/grpc/modelmesh/test_load.py::test_a_model_is_told_with_its_limit"
    ),
    "log_level": "journeys/observability/test_log_lines.py::test_debug_is_of_the_adapter_alone",
    "log_format": "journeys/observability/test_text_log.py"
    "::test_log_lines_begin_with_time_and_level",
    "warm_up": "packages/test_warm_up.py::test_model_computes_zeros_before_load_is_answered",
}


def test_the_effect_of_every_setting_is_looked_at():
    looked_at = [*SEEN, *SHOWN]
    assert sorted(looked_at) == sorted(Settings.model_fields)
    for test in SHOWN.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8")


def test_long_work_shares_its_turns():
    adapter = Adapter(load_settings({}, {}, None))
    kinds = (HttpServer, HttpDataPlane, Rpc)
    assert len({id(part(part(adapter, kind), Turns)) for kind in kinds}) == 1


def test_limit_of_mps_in_environment_reaches_memory(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=4G")
    adapter = Adapter(load_settings({"memory_limit": "8GiB"}, {}, None))
    assert adapter.parts.control.memory.settings.process_limits == {0: 4 * 2**30}


def test_mesh_loads_one_and_calls_load_two(tmp_path):
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
        if adapter.parts.embedded is not None:
            await adapter.parts.embedded.stop()


async def test_every_http_listener_plans_once_triton_known(tmp_path):
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    settings = load_settings(flags | {"http_data": f"unix:{tmp_path}/data"}, {}, None)
    adapter = Adapter(settings)
    adapter.connect("127.0.0.1:4567", "127.0.0.1:4568")
    assert {rest.name: rest.heads.host for rest in adapter.parts.rest} == {
        "http": "127.0.0.1:4567",
        "http_data": "127.0.0.1:4567",
    }


def test_every_http_listener_renews_its_connections_while_unready(tmp_path):
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    settings = load_settings(flags | {"http_data": f"unix:{tmp_path}/data"}, {}, None)
    adapter = Adapter(settings)
    renewed = [rest.listener.renew_connections for rest in adapter.parts.rest]
    assert len(renewed) == 2
    assert adapter.parts.unready._end_connections == renewed


@pytest.mark.parametrize(("kind", "contract"), [(SageMaker, "sagemaker"), (V2, "v2")])
def test_every_call_of_table_has_handler_alone(tmp_path, kind, contract):
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    adapter = Adapter(load_settings(flags, {}, None))

    operations = {route.operation for route in ROUTES if route.contract == contract}
    assert set(part(adapter, kind).handlers) == operations
