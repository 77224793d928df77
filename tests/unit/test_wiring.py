"""Settings reach the parts that they are about, and no part is given another's."""

import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter.app import Adapter
from adapter.assembly import model_roots
from adapter.settings import Loaded, Settings, load_settings
from adapter.settings.examples import examples_folder

TESTS = Path(__file__).parents[1]

# A value that nothing else has, and the attributes of the adapter's parts that must hold it.
HELD = {
    "load_timeout_seconds": ("1234.5", {"load", "_load_timeout"}),
    "unload_timeout_seconds": ("1235.5", {"unload"}),
    "unload_stall_seconds": ("7.25", {"stall"}),
    "infer_timeout_seconds": ("1236.5", {"_timeout"}),
    "load_wait_seconds": ("1237.5", {"load_wait_seconds", "_load_wait_seconds", "_load_wait"}),
    "control_timeout_seconds": ("1238.5", {"_timeout"}),
    "memory_recovery_seconds": ("1239.5", {"recovery"}),
    "drain_min_seconds": ("6.75", {"_min_seconds"}),
    "size_factor": ("1.875", {"_size_factor", "_factor"}),
    "default_size": ("123457", {"default_bytes"}),
    "max_body_bytes": ("1234567", {"_max_body", "_max_unpacked"}),
    "max_control_body_bytes": ("234567", {"_max_control_body"}),
    "grpc_max_unary_bytes": ("345678", {"unary", "max_bytes"}),
    "grpc_max_stream_bytes": ("3456789", {"stream", "_max_message_bytes"}),
    "max_inflight_body_bytes": ("34567891", {"limit"}),
    "max_unpacked_bytes": ("456789", {"max_unpacked_bytes"}),
    "memory_limit": ("98765432109", {"_memory_limit"}),
    "max_abandoned_requests": ("77", {"_max_abandoned"}),
    "modelmesh_default_size": ("567891", {"_default"}),
    "modelmesh_memory_buffer": ("12345678", {"_buffer"}),
    "modelmesh_memory": ("9876543210", {"_memory"}),
    "max_connections": ("501", {"_most"}),
}


def parts_of(held: object) -> Iterator[tuple[str, object]]:
    """What an object of the adapter holds, by its name; also in closures, lists and dicts."""
    if isinstance(held, dict):
        yield from (("", value) for value in list(held.values()))
    elif isinstance(held, list | tuple | set | frozenset):
        yield from (("", value) for value in list(held))
    elif isinstance(held, types.MethodType):
        yield "", held.__self__
    elif isinstance(held, types.FunctionType):
        cells = zip(held.__code__.co_freevars, held.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells)
    elif type(held).__module__.startswith("adapter."):
        slots = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*getattr(held, "__dict__", ()), *slots):
            if hasattr(held, name):
                yield name, getattr(held, name)


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
    "staging": Look("copy", lambda a: a._control._packages._staging, "copy"),
    "repository": Look("/elsewhere", lambda a: a._repository, Path("/elsewhere")),
    "model_roots": Look(["/a", "/b"], lambda a: a._control._packages._roots, ["/a", "/b"]),
    "single_model": Look("/models/one", lambda a: a._single, "one"),
    "examples": Look("true", lambda a: model_roots(a._settings)[-1], examples_folder()),
    "memory_source": Look("nvml", lambda a: a._memory._wanted, "nvml"),
    "memory_reserve": Look("123MiB", lambda a: a._control.memory.ledger._headroom(0), 123 * 2**20),
    "sizes_file": Look("/kept", lambda a: a._control._housekeeping._store._path, Path("/kept")),
    "on_triton_restart": Look("reload", lambda a: str(a._control.presence._loads_again), "True"),
    "oom_patterns": Look(
        ["tank is dry"], lambda a: a._triton._faults._classifier._extra[0].pattern, "tank is dry"
    ),
    # with a second for those who are told that it is over
    "drain_timeout_seconds": Look("21", lambda a: a._listeners._grace_seconds, 22),
    "passthrough": Look("log", lambda a: a._v2._passthrough, {"log"}),
}

# What is read once the adapter runs, or by what is given all settings: the test that sees it.
SHOWN = {
    "http": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "grpc": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "grpc_data": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "admin": "unit/test_wiring.py::test_each_listener_is_where_its_setting_says",
    "triton_hang_seconds": (
        "contract/test_hangs.py::test_a_triton_that_stands_still_is_ended_and_started_again"
    ),
    "load_concurrency": "frontends/grpc/test_modelmesh.py::test_what_a_mesh_is_told",
    "modelmesh_load_timeout_seconds": (
        "frontends/grpc/test_modelmesh.py::test_no_longer_load_is_promised_than_is_allowed"
    ),
    "modelmesh_model_concurrency": (
        "frontends/grpc/test_modelmesh.py::test_a_model_is_told_with_its_limit"
    ),
    "modelmesh_runtime_version": (
        "frontends/grpc/test_modelmesh.py::test_the_version_of_a_triton_that_tells_none_is_a_setting"
    ),
    "grpc_max_message_bytes": (
        "unit/settings/test_modelmesh.py::test_the_limit_of_all_messages_holds_however_they_go"
    ),
    "log_level": "unit/test_wiring.py::test_the_log_is_as_its_settings_say",
    "log_format": "unit/test_wiring.py::test_the_log_is_as_its_settings_say",
}


def test_the_effect_of_every_setting_is_looked_at():
    looked_at = [*HELD, *SEEN, *SHOWN]
    assert sorted(looked_at) == sorted(Settings.model_fields)
    for test in SHOWN.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


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
    listeners = {
        name: f"unix:{tmp_path / name}.sock" for name in ("http", "grpc", "grpc_data", "admin")
    }
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    adapter = Adapter(load_settings(flags | listeners, {}, None))
    await adapter._open_listeners()
    try:
        assert adapter.addresses == listeners
        assert all((tmp_path / f"{name}.sock").is_socket() for name in listeners)
    finally:
        await adapter._listeners.close()
        await adapter._listeners.close_probes()


def test_the_log_is_as_its_settings_say(tmp_path):
    """Of a start that fails for want of a Triton: errors for people, and nothing of less weight."""
    nobody = f"127.0.0.1:{free_port()}"
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
