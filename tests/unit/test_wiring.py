"""Settings reach the parts that they are about, and no part is given another's."""

import types
from collections.abc import Iterator

import pytest

from adapter.app import Adapter
from adapter.settings import Loaded, Settings, load_settings

# A value that nothing else has, and the attributes of the adapter's parts that must hold it.
HELD = {
    "load_timeout_seconds": ("1234.5", {"load", "_load_timeout"}),
    "unload_timeout_seconds": ("1235.5", {"unload"}),
    "unload_stall_seconds": ("7.25", {"stall"}),
    "infer_timeout_seconds": ("1236.5", {"_timeout", "timeout_seconds"}),
    "load_wait_seconds": ("1237.5", {"load_wait_seconds", "_load_wait_seconds", "_load_wait"}),
    "control_timeout_seconds": ("1238.5", {"_timeout"}),
    "memory_recovery_seconds": ("1239.5", {"recovery"}),
    "drain_min_seconds": ("6.75", {"_min_seconds"}),
    "size_factor": ("1.875", {"_size_factor", "_factor"}),
    "default_size": ("123457", {"default_bytes"}),
    "max_body_bytes": ("1234567", {"_max_body", "max_unpacked_bytes"}),
    "max_control_body_bytes": ("234567", {"_max_control_body"}),
    "grpc_max_message_bytes": ("345678", {"_max_message_bytes"}),
    "max_unpacked_bytes": ("456789", {"max_unpacked_bytes"}),
    "memory_limit": ("98765432109", {"_memory_limit"}),
    "max_abandoned_requests": ("77", {"_max_abandoned"}),
    "modelmesh_default_size": ("567891", {"_default"}),
    "modelmesh_memory": ("9876543210", {"_memory"}),
    "max_connections": ("501", {"_max_connections", "_most"}),
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


def test_what_was_learned_is_kept_in_the_file_that_is_named(tmp_path):
    sizes = tmp_path / "learned.json"
    flags = {"triton": "external", "model_roots": [str(tmp_path)], "repository": str(tmp_path)}
    adapter = Adapter(load_settings(flags | {"sizes_file": str(sizes)}, {}, None))

    assert adapter._control._watch._store._path == sizes
