"""An upgrade from a build that had more settings: what it had set is refused, all at once."""

import json

import pytest

from adapter.errors import InvalidSettings
from adapter.settings import Settings, load_settings, variable_of

# as the environment, the file and the chart's values of that build had them
GONE = {
    "control_token_file": "/run/secrets/token",
    "triton_hang_seconds": 30,
    "max_unpacked_bytes": "64GiB",
    "single_model_helpers": "encoder decoder",
    "ready_when": "started",
    "fetch_concurrency": 4,
    "store_timeout_seconds": 20,
    "eviction": "lru",
    "min_residency_seconds": 1,
    "reported_sizes": True,
    "default_size": "500MiB",
    "sizes_file": "/data/sizes.json",
    "unload_timeout_seconds": 340,
    "unload_stall_seconds": 30,
    "load_wait_seconds": 5,
    "max_connections": 1000,
    "grpc_max_message_bytes": "16MiB",
    "modelmesh_load_timeout_seconds": 90,
    "modelmesh_memory_buffer": "128MiB",
    "modelmesh_memory": "8GiB",
    "modelmesh_runtime_version": "v1",
}
KEPT = {"triton": "embedded", "memory_limit": "8GiB", "drain_min_seconds": 5}
NEAREST = {
    "control_token_file": "control_token",
    "single_model_helpers": "single_model",
    "unload_timeout_seconds": "load_timeout_seconds",
}


def test_environment_before_cut_is_refused_at_once():
    environ = {variable_of(name): str(value) for name, value in (GONE | KEPT).items()}
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, environ, None)
    problems = caught.value.problems
    assert len(problems) == len(GONE)
    for name, text in zip(GONE, problems, strict=True):
        assert text.startswith(f"environment {variable_of(name)}: no such setting")


def test_file_before_cut_is_refused_at_once(tmp_path):
    file = tmp_path / "adapter.yaml"
    file.write_text(json.dumps(GONE | KEPT))
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, {}, file)
    starts = [f"file {file}, key {name}: no such setting" for name in GONE]
    for start, text in zip(starts, caught.value.problems, strict=True):
        assert text.startswith(start)


@pytest.mark.parametrize(("name", "nearest"), NEAREST.items())
def test_setting_of_before_cut_is_told_its_nearest(name, nearest):
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, {variable_of(name): str(GONE[name])}, None)
    [text] = caught.value.problems
    assert text.endswith(f"did you mean {variable_of(nearest)}?")


def test_there_are_at_most_55_settings():
    assert len(Settings.model_fields) <= 55
    assert not GONE.keys() & Settings.model_fields
