"""Each layout that AWS's `serve` script and Triton's SageMaker server accept, on a real Triton.

The script starts Triton for the folder /opt/ml/model, by the environment; the server loads what
SageMaker has unpacked to /opt/ml/models/HASH/model, under the name HASH.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from adapter.settings import load_settings
from tests.asking import model_names
from tests.packages.models import write_adding, write_alone, write_ensemble
from tests.running import Client, RunningAdapter, embedded_adapter, unload_all
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

ONE_MODEL = "/opt/ml/model"
_CALLS = """
call = pb_utils.InferenceRequest(
    model_name={name},
    requested_output_names=["OUT"],
    inputs=[pb_utils.Tensor("IN", values)],
)
reply = call.exec()
if reply.has_error():
    raise pb_utils.TritonModelException(reply.error().message())
values = pb_utils.get_output_tensor_by_name(reply, "OUT").as_numpy()
"""
ENTRY = 'parameters { key: "adapter_entry" value { string_value: "true" } }'


@dataclass(frozen=True)
class Layout:
    """Describes a folder as SageMaker hands it over: its model adds `adds` to each value."""

    name: str
    make: Callable[[Path], object]
    adds: int
    environ: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def one_model(folder: Path) -> None:
    write_adding(folder / "net", 1)


def one_model_of_several_versions(folder: Path) -> None:
    for version in (1, 3):
        write_adding(folder / "net", version, version=str(version))


def one_model_without_a_config(folder: Path) -> None:
    write_alone(folder / "net" / "1" / "model.py", 1)


def an_ensemble(folder: Path) -> None:
    write_adding(folder / "pre", 1)
    write_alone(folder / "post" / "1" / "model.py", 2)
    write_ensemble(folder / "whole", "pre", "post")


def an_ensemble_of_ensembles(folder: Path) -> None:
    write_adding(folder / "add", 1)
    write_ensemble(folder / "inner", "add", "add", version=None)
    write_ensemble(folder / "outer", "inner", "add", version=None)


def code_that_calls_its_neighbour(folder: Path) -> None:
    write_adding(folder / "add", 1)
    write_python_model(folder / "calls", answer=_CALLS.format(name="'add'"))


def code_that_makes_the_names(folder: Path) -> None:
    write_adding(folder / "0_add", 1)
    write_adding(folder / "1_add", 2)
    write_python_model(folder / "executor", answer=_CALLS.format(name="str(0) + '_add'"))


def several_models(folder: Path) -> None:
    """Triton serves the one that the folder lists last; here it has to say so."""
    write_adding(folder / "a", 1)
    write_python_model(folder / "b", answer="values = values + 2", config=f"{CONFIG}{ENTRY}")


MULTI_MODEL = {"SAGEMAKER_MULTI_MODEL": "true"}
OF_A_MULTI_MODEL_ENDPOINT = [
    Layout("one model", one_model, 1),
    Layout("one model of several versions", one_model_of_several_versions, 3),
    Layout("one model without a config", one_model_without_a_config, 1),
    Layout("an ensemble", an_ensemble, 3),
    Layout("an ensemble of ensembles", an_ensemble_of_ensembles, 3),
    Layout("code that calls its neighbour", code_that_calls_its_neighbour, 1),
    Layout("code that makes the names that it calls", code_that_makes_the_names, 1),
    Layout("several models", several_models, 2),
]


def named(model: str, **more: str) -> dict[str, str]:
    return {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": model, **more}


OF_ONE_MODEL = [
    Layout("the only folder", one_model, 1, {"SAGEMAKER_MULTI_MODEL": "false"}),
    Layout("one of several", several_models, 1, named("a")),
    Layout("an ensemble by name", an_ensemble, 3, named("whole")),
    Layout("code that calls its neighbour", code_that_calls_its_neighbour, 1, named("calls")),
    Layout(
        "code that makes the names, and a further model to load",
        code_that_makes_the_names,
        1,
        named("executor", SAGEMAKER_TRITON_LOG_VERBOSE="false --load-model=0_add"),
    ),
    Layout(
        "a further model in additional arguments",
        code_that_makes_the_names,
        1,
        named("executor", SAGEMAKER_TRITON_ADDITIONAL_ARGS="--load-model=0_add"),
    ),
]


@pytest.fixture(scope="module")
def endpoint(model_root) -> Iterator[RunningAdapter]:
    with embedded_adapter(f"--model-roots={model_root}", environ=MULTI_MODEL) as adapter:
        yield adapter


@pytest.fixture
def platform(endpoint) -> Iterator[Client]:
    with endpoint.client() as client:
        yield client
    unload_all(endpoint)


@pytest.mark.parametrize("layout", OF_A_MULTI_MODEL_ENDPOINT, ids=str)
def test_layout_of_a_multi_model_endpoint_is_served(platform, package, layout):
    name = sha256(str(package).encode()).hexdigest()[:32]
    url = package / name / "model"
    layout.make(url)
    loaded = platform.post("/models", {"model_name": name, "url": str(url)})
    assert loaded.status == 200, loaded.body
    invoked = platform.invoke(name)
    assert invoked.data == [1.0 + layout.adds]
    platform.unload_model(name)


@pytest.mark.parametrize("layout", OF_ONE_MODEL, ids=str)
def test_layout_of_a_single_model_is_served(tmp_path, layout):
    """The folder of the test stands in for /opt/ml/model. Callers see the one model alone."""
    layout.make(tmp_path / "model")
    folders = {path.name for path in (tmp_path / "model").iterdir()}
    settings = load_settings({"triton": "embedded"}, layout.environ, None).settings
    single = str(settings.single_model).replace(ONE_MODEL, str(tmp_path / "model"))
    with (
        embedded_adapter(f"--single-model={single}") as adapter,
        adapter.client() as client,
    ):
        assert client.get("/ping").status == 200
        invoked = client.post("/invocations", infer_body(1.0)).json()
        assert invoked["outputs"][0]["data"] == [1.0 + layout.adds]
        name = invoked["model_name"]
        assert model_names(client) == [name]
        of_v2 = client.post(f"/v2/models/{name}/infer", infer_body(1.0))
        assert of_v2.data == [1.0 + layout.adds]
        for other in folders - {name}:
            assert client.get(f"/v2/models/{other}").status == 404
