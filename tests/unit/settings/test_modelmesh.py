"""The variables of ModelMesh's own Triton adapter, and what a mesh would refuse."""

import pytest

from adapter.errors import InvalidSettings
from adapter.settings import load_settings
from adapter.settings.modelmesh import MAX_SIZE_BYTES, refuse_capacity
from tests.cases import rows

MIB = 2**20


def load(**environ: str):
    return load_settings({}, environ, None)


def problem(**environ: str) -> str:
    with pytest.raises(InvalidSettings) as caught:
        load(**environ)
    [text] = caught.value.problems
    return text


@rows(
    ("variable", "value", "setting", "meaning"),
    [
        ("ADAPTER_PORT", "9085", "grpc", "127.0.0.1:9085"),
        ("RUNTIME_PORT", "9001", "triton_grpc", "127.0.0.1:9001"),
        ("CONTAINER_MEM_REQ_BYTES", "8589934592", "modelmesh_capacity", "8321499136"),
        ("LOADING_CONCURRENCY", "2", "load_concurrency", "2"),
        ("LOADTIME_TIMEOUT", "90000", "load_timeout_seconds", "90.0"),
        ("DEFAULT_MODELSIZE", "5000000", "modelmesh_default_size", "5000000"),
        ("MODELSIZE_MULTIPLIER", "1.35", "size_factor", "1.35"),
        ("LIMIT_PER_MODEL_CONCURRENCY", "4", "modelmesh_model_concurrency", "4"),
        ("ROOT_MODEL_DIR", "/data", "repository", "/data/_triton_models"),
    ],
)
def test_a_variable_of_the_go_adapter_sets(variable, value, setting, meaning):
    loaded = load(**{variable: value})
    assert str(getattr(loaded.settings, setting)) == meaning
    assert loaded.origins[setting] == variable
    assert loaded.warnings == []


@pytest.mark.parametrize(("host", "grpc"), [("0.0.0.0", "0.0.0.0:9085"), ("::", "[::]:9085")])
def test_port_of_go_adapter_is_at_listen_host(host, grpc):
    assert str(load(ADAPTER_PORT="9085", ADAPTER_LISTEN_HOST=host).settings.grpc) == grpc


def test_our_own_names_beat_the_inherited_ones():
    settings = load(ADAPTER_PORT="9085", ADAPTER_GRPC="unix:/mm-sock/rt.sock").settings
    assert str(settings.grpc) == "unix:/mm-sock/rt.sock"


def test_the_controllers_whole_environment_is_accepted():
    loaded = load(
        ADAPTER_PORT="8085",
        RUNTIME_PORT="8001",
        RUNTIME_DATA_ENDPOINT="port:8001",
        CONTAINER_MEM_REQ_BYTES="1073741824",
        MEM_BUFFER_BYTES="134217728",
        LOADTIME_TIMEOUT="90000",
        USE_EMBEDDED_PULLER="false",
        RUNTIME_VERSION="v0.11.2",
        LOADING_CONCURRENCY="2",
        LIMIT_PER_MODEL_CONCURRENCY="",
    )
    assert loaded.warnings == []


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:80", "udp://10.0.0.1:80"])
def test_kubernetes_service_variables_are_no_ports(value):
    assert str(load(ADAPTER_PORT=value).settings.grpc) == "127.0.0.1:8085"


@rows(
    ("variable", "value"),
    [
        ("ADAPTER_PORT", "abc"),
        ("CONTAINER_MEM_REQ_BYTES", "-1"),
        ("CONTAINER_MEM_REQ_BYTES", "much"),
        ("CONTAINER_MEM_REQ_BYTES", str(2**44 + 256 * MIB)),
        ("MEM_BUFFER_BYTES", "-1"),
        ("LOADING_CONCURRENCY", "0"),
        ("LOADING_CONCURRENCY", "two"),
        ("LOADTIME_TIMEOUT", "99"),
        ("LOADTIME_TIMEOUT", "soon"),
        ("DEFAULT_MODELSIZE", "0"),
        ("DEFAULT_MODELSIZE", str(2**44)),
        ("MODELSIZE_MULTIPLIER", "0"),
        ("MODELSIZE_MULTIPLIER", "nan"),
        ("LIMIT_PER_MODEL_CONCURRENCY", "-1"),
        ("LIMIT_PER_MODEL_CONCURRENCY", "some"),
    ],
)
def test_unfit_for_mesh_is_refused_by_name(variable, value):
    assert problem(**{variable: value}).startswith(f"{variable}: {value!r}: ")


def test_container_too_small_is_refused_with_figures():
    text = problem(CONTAINER_MEM_REQ_BYTES=str(300 * MIB), DEFAULT_MODELSIZE=str(30 * MIB))
    assert "leaves a capacity of 44.0 MiB" in text
    assert "models of 30.0 MiB by default ModelMesh does not start below 300.0 MiB" in text


@rows(
    ("container", "buffer", "text"),
    [
        ("100MB", "", "is not more than MEM_BUFFER_BYTES (256.0 MiB), which Triton itself takes"),
        ("1GiB", "1GiB", "is not more than MEM_BUFFER_BYTES (1.0 GiB), which Triton itself takes"),
    ],
)
def test_a_container_is_refused_that_the_buffer_fills(container, buffer, text):
    given = {"CONTAINER_MEM_REQ_BYTES": container, "MEM_BUFFER_BYTES": buffer}
    assert problem(**given) == f"CONTAINER_MEM_REQ_BYTES: {container!r}: {text}"


def test_the_buffer_is_left_to_triton():
    loaded = load(CONTAINER_MEM_REQ_BYTES=str(1024 * MIB), MEM_BUFFER_BYTES=str(128 * MIB))
    assert loaded.settings.modelmesh_capacity == 896 * MIB


@pytest.mark.parametrize(
    ("capacity", "default"),
    [
        (10 * MIB, MIB),  # ten models
        (512 * MIB, 100 * MIB),  # or half a GiB
        (2048 * MIB, 1024 * MIB),  # but two models
        (MAX_SIZE_BYTES - 1, MIB),
    ],
)
def test_a_mesh_starts_with_just_enough(capacity, default):
    refuse_capacity(capacity, default)
    with pytest.raises(ValueError, match="ModelMesh"):
        refuse_capacity(capacity + 1 if capacity > 2**43 else capacity - 1, default)


def test_there_is_no_puller_to_be_embedded():
    text = problem(USE_EMBEDDED_PULLER="true")
    assert text.startswith("environment USE_EMBEDDED_PULLER: 'true': this adapter has no puller")


def test_keras_files_are_not_converted():
    [warning] = load(MAX_CONC_KERAS_CONV_PROCS="2").warnings
    assert warning.startswith("environment MAX_CONC_KERAS_CONV_PROCS: ignored")


@pytest.mark.parametrize(
    ("text", "calls"), [("log", ("log",)), ("shared_memory,trace", ("shared_memory", "trace"))]
)
def test_calls_about_whole_server_are_opened_by_name(text, calls):
    assert load(ADAPTER_PASSTHROUGH=text).settings.passthrough == calls
