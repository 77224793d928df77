"""Every name that SageMaker, or Triton's serve script there, is known to set."""

from pathlib import Path

import pytest

from adapter.errors import InvalidSettings
from adapter.settings import Loaded, Reserve, load_settings
from tests.cases import rows

# Read in the serve script of Triton's repository (2026-08), and in the toolkits of AWS.
TRITONS = [
    *("DEFAULT_MODEL_NAME", "OVERRIDE_PING_MODE", "PING_MODE"),
    *("DISABLE_MODEL_NAMESPACING", "ALLOW_GRPC", "ALLOW_METRICS", "METRICS_PORT", "GRPC_PORT"),
    *("BUFFER_MANAGER_THREAD_COUNT", "THREAD_COUNT", "LOG_VERBOSE", "LOG_INFO", "LOG_WARNING"),
    *("LOG_ERROR", "SHM_DEFAULT_BYTE_SIZE", "SHM_GROWTH_BYTE_SIZE", "TENSORFLOW_VERSION"),
    *("MODEL_LOAD_GPU_LIMIT", "ADDITIONAL_ARGS"),
]
OTHERS = [
    *("MULTI_MODEL", "BIND_TO_PORT", "SAFE_PORT_RANGE", "MODEL_SERVER_TIMEOUT"),
    *("MODEL_SERVER_TIMEOUT_SECONDS", "MAX_PAYLOAD_IN_MB", "MAX_REQUEST_SIZE", "STARTUP_TIMEOUT"),
    *("NUM_MODEL_WORKERS", "DEFAULT_INVOCATIONS_ACCEPT", "GUNICORN_WORKERS", "TFS_NGINX_LOGLEVEL"),
]
NAMES = [f"SAGEMAKER_TRITON_{name}" for name in TRITONS] + [f"SAGEMAKER_{name}" for name in OTHERS]


def load(flags: dict[str, object] | None = None, **environ: str) -> Loaded:
    return load_settings(flags or {}, environ, None)


def embedded(**environ: str) -> Loaded:
    return load({"triton": "embedded"}, **environ)


def problems(**environ: str) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        embedded(**environ)
    return caught.value.problems


def listeners(loaded: Loaded) -> dict[str, str]:
    names = ("http", "grpc", "grpc_data", "admin", "triton_http", "triton_grpc", "triton_metrics")
    return {name: str(getattr(loaded.settings, name)) for name in names}


@rows("name", NAMES)
def test_each_variable_is_used_or_says_otherwise(name):
    value = dict.fromkeys(NAMES, "9") | {
        "SAGEMAKER_MULTI_MODEL": "false",
        "SAGEMAKER_SAFE_PORT_RANGE": "8081-9000",
        "SAGEMAKER_TRITON_ALLOW_GRPC": "false",
        "SAGEMAKER_TRITON_ALLOW_METRICS": "false",
        "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": "0.5",
        "SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "live",
        "SAGEMAKER_TRITON_PING_MODE": "live",
    }

    loaded = embedded(**{name: value[name]})

    sets = any(name in origin for origin in loaded.origins.values())
    said = any(name in warning for warning in loaded.warnings)
    assert sets is not said


class TestModels:
    @pytest.mark.parametrize(
        ("environ", "model"),
        [
            ({}, None),
            ({"SAGEMAKER_MULTI_MODEL": "true"}, None),
            ({"SAGEMAKER_MULTI_MODEL": "false"}, Path("/opt/ml/model")),
            ({"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m"}, Path("/opt/ml/model/m")),
            (
                {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "SAGEMAKER_MULTI_MODEL": "false"},
                Path("/opt/ml/model/m"),
            ),
            (
                {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "SAGEMAKER_MULTI_MODEL": "true"},
                None,
            ),
        ],
    )
    def test_multi_model_or_the_one_that_is_named(self, environ, model):
        single = load(**environ).settings.single_model
        assert (single and single.folder) == model


class TestListeners:
    def test_safe_range_holds_every_port_but_bound_one(self):
        loaded = embedded(
            SAGEMAKER_BIND_TO_PORT="8501",
            SAGEMAKER_SAFE_PORT_RANGE="8500-8600",
            SAGEMAKER_TRITON_METRICS_PORT="8502",
        )
        assert listeners(loaded) == {
            "http": "0.0.0.0:8501",
            "admin": "0.0.0.0:8502",
            "grpc": "0.0.0.0:8500",
            "grpc_data": "off",
            "triton_http": "127.0.0.1:8503",
            "triton_grpc": "127.0.0.1:8504",
            "triton_metrics": "127.0.0.1:8505",
        }

    def test_safe_range_leaves_external_triton_alone(self):
        found = listeners(load(SAGEMAKER_SAFE_PORT_RANGE="8500-8600"))
        assert found["triton_grpc"] == "127.0.0.1:8001"
        assert found["admin"] == "0.0.0.0:8500"

    def test_setting_of_our_own_beats_safe_range(self):
        loaded = embedded(SAGEMAKER_SAFE_PORT_RANGE="8500-8600", ADAPTER_ADMIN="127.0.0.1:9")
        assert listeners(loaded)["admin"] == "127.0.0.1:9"

    @pytest.mark.parametrize("value", ["8500", "8500-", "a-b", "9000-8000", "8500-8503"])
    def test_unusable_range_is_refused_by_name(self, value):
        [problem] = problems(SAGEMAKER_SAFE_PORT_RANGE=value)
        assert problem.startswith(f"environment SAGEMAKER_SAFE_PORT_RANGE: '{value}': ")

    def test_port_outside_safe_range_is_refused(self):
        [problem] = problems(
            SAGEMAKER_SAFE_PORT_RANGE="8500-8600", SAGEMAKER_TRITON_GRPC_PORT="8001"
        )
        assert problem.startswith("environment SAGEMAKER_TRITON_GRPC_PORT: '8001': is outside")

    @pytest.mark.parametrize(
        ("environ", "admin"),
        [
            ({}, "127.0.0.1:8081"),
            ({"SAGEMAKER_TRITON_METRICS_PORT": "9002"}, "127.0.0.1:9002"),
            ({"SAGEMAKER_SAFE_PORT_RANGE": "8500-8600"}, "127.0.0.1:8500"),
        ],
    )
    def test_unallowed_metrics_are_for_loopback(self, environ, admin):
        assert (
            listeners(embedded(SAGEMAKER_TRITON_ALLOW_METRICS="False", **environ))["admin"] == admin
        )


class TestTriton:
    def test_options_are_passed_with_additions_last(self):
        loaded = embedded(
            SAGEMAKER_TRITON_ADDITIONAL_ARGS="--log-file='/opt/a b' --log-info=1",
            SAGEMAKER_TRITON_LOG_VERBOSE="true",
            SAGEMAKER_TRITON_THREAD_COUNT="3",
            SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE="16777216",
        )
        assert loaded.settings.triton_args == (
            "--http-thread-count=3",
            "--log-verbose=true",
            "--backend-config=python,shm-default-byte-size=16777216",
            "--log-file=/opt/a b",
            "--log-info=1",
        )

    @pytest.mark.parametrize("name", ["LOG_VERBOSE", "THREAD_COUNT", "ADDITIONAL_ARGS"])
    def test_value_is_split_as_serve_script_does(self, name):
        """Notebooks put further arguments behind the value of any variable."""
        value = "2 --strict-readiness=false  --rate-limit=off"
        loaded = embedded(**{f"SAGEMAKER_TRITON_{name}": value})
        assert loaded.settings.triton_args[1:] == (
            "--strict-readiness=false",
            "--rate-limit=off",
        )

    def test_strict_readiness_is_refused_with_another_value(self):
        [problem] = problems(SAGEMAKER_TRITON_LOG_VERBOSE="1 --strict-readiness=true")
        assert "--strict-readiness, which the adapter sets to false" in problem

    @pytest.mark.parametrize("name", ["LOG_VERBOSE", "ADDITIONAL_ARGS"])
    @pytest.mark.parametrize("spelling", ["--load-model={}", "--load-model {}"])
    def test_models_of_load_model_are_helpers(self, name, spelling):
        """The default model itself may be named, too: the script names it twice then."""
        options = " ".join(spelling.format(model) for model in ("encoder", "main", "decoder"))
        value = f"--log-info=1 {options}"
        loaded = embedded(
            SAGEMAKER_TRITON_DEFAULT_MODEL_NAME="main",
            **{f"SAGEMAKER_TRITON_{name}": value},
        )
        assert loaded.settings.single_model.helpers == ("encoder", "decoder")
        assert not any("load-model" in argument for argument in loaded.settings.triton_args)
        assert loaded.settings.triton_args[-1].endswith("--log-info=1")
        assert loaded.origins["single_model"].endswith(name)

    def test_load_model_needs_no_helper_without_default_name(self):
        """The package is all of /opt/ml/model then, and every model in it is loaded."""
        loaded = embedded(
            SAGEMAKER_MULTI_MODEL="false", SAGEMAKER_TRITON_ADDITIONAL_ARGS="--load-model=encoder"
        )
        assert loaded.settings.single_model.helpers == ()
        assert loaded.settings.triton_args == ()

    @pytest.mark.parametrize(("limit", "reserve"), [("0.8", Reserve(20.0)), ("1", Reserve())])
    def test_limit_of_memory_in_use_is_reserve(self, limit, reserve):
        loaded = embedded(SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT=limit)
        assert loaded.settings.memory_reserve == reserve


class TestLimits:
    def test_sizes_and_times_of_other_containers(self):
        settings = load(
            SAGEMAKER_MAX_PAYLOAD_IN_MB="6",
            SAGEMAKER_MODEL_SERVER_TIMEOUT="60",
            SAGEMAKER_STARTUP_TIMEOUT="600",
        ).settings
        assert settings.max_body_bytes == 6 * 2**20
        assert settings.infer_timeout_seconds == 60
        assert settings.start_timeout_seconds == 600


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAGEMAKER_TRITON_OVERRIDE_PING_MODE", "sometimes"),
        ("SAGEMAKER_TRITON_ALLOW_GRPC", "perhaps"),
        ("SAGEMAKER_TRITON_ALLOW_METRICS", "yes"),
        ("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", "1.5"),
        ("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", "half"),
    ],
)
def test_value_that_means_nothing_is_refused_by_name(name, value):
    [problem] = problems(**{name: value})
    assert problem.startswith(f"environment {name}: '{value}': write ")


@pytest.mark.parametrize("kind", ["infer", "generate", "generate_stream"])
def test_type_of_inference_is_one_of_tritons_three(kind):
    loaded = embedded(SAGEMAKER_TRITON_INFERENCE_TYPE=kind)
    assert (loaded.settings.inference_type, loaded.warnings) == (kind, [])


def test_another_type_of_inference_is_refused_with_three():
    [problem] = problems(SAGEMAKER_TRITON_INFERENCE_TYPE="stream")
    assert problem.startswith("SAGEMAKER_TRITON_INFERENCE_TYPE: 'stream': ")
    assert [
        kind for kind in ("'infer'", "'generate'", "'generate_stream'") if kind not in problem
    ] == []


def test_a_misspelt_name_of_tritons_is_told():
    [warning] = load(SAGEMAKER_TRITON_LOG_VERBOZE="1").warnings
    assert (
        warning == "environment SAGEMAKER_TRITON_LOG_VERBOZE: ignored: no such name is known here"
    )


def test_what_the_platform_says_beside_is_nobodys_concern():
    assert load(SAGEMAKER_REGION="eu-west-1", SAGEMAKER_TRITON_GRPC_PORT="").warnings == []
