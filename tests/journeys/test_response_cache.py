"""Triton's response cache: a model is never answered for by another that had its name before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import pytriton

from tests.grpc_calls import calls_to
from tests.journeys.v2.calls import CONFIG, Repository, uploading_adapter
from tests.processes import triton_client
from tests.running import (
    RunningAdapter,
    embedded_adapter,
    unload_all,
    wait_until,
)
from tests.trees import CONFIG as PLAIN
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

CACHES = Path(pytriton.__file__).parent / "tritonserver" / "caches"
CACHED = PLAIN + "response_cache { enable: true }\n"
ENSEMBLE = """\
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [{
  model_name: "step" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
}] }
"""
CALLING = """\
call = pb_utils.InferenceRequest(model_name="helper", requested_output_names=["OUT"],
    inputs=[pb_utils.Tensor("IN", values)])
values = pb_utils.get_output_tensor_by_name(call.exec(), "OUT").as_numpy()
"""


@pytest.fixture(scope="module")
def caching_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cached")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def shared_caching(caching_root, store, tmp_path_factory) -> Iterator[RunningAdapter]:
    flags = (
        f"--model-roots={caching_root}",
        f"--triton-args=--cache-directory={CACHES}",
        "--triton-args=--cache-config=local,size=1048576",
        f"--model-store={store}",
        f"--cache-dir={tmp_path_factory.mktemp('disk')}",
        "--revalidate-seconds=1",
    )
    with embedded_adapter(*flags) as adapter:
        yield adapter


@pytest.fixture
def caching(shared_caching) -> Iterator[RunningAdapter]:
    """An adapter whose Triton has a response cache."""
    yield shared_caching
    unload_all(shared_caching)


@pytest.fixture
def repository(caching) -> Iterator[Repository]:
    with caching.client() as client:
        yield Repository(client)


def write_factor(folder: Path, factor: int, config: str = CACHED) -> Path:
    """Write a model that multiplies. Python knows bytecode by the time and size of its source."""
    answer = f"values = {factor} * values  {'#' * factor}"
    return write_python_model(folder, answer=answer, config=config)


def test_cached_model_is_answered_from_the_cache(repository, caching_root):
    """Else no other test here would show anything."""
    answer = "self.calls = getattr(self, 'calls', 0) + 1\nvalues = values * 0 + self.calls"
    write_python_model(caching_root / "counted", answer=answer, config=CACHED)
    assert repository.load("counted").status == 200
    assert [repository.infer("counted", 1.0) for _ in range(3)] == [[1.0]] * 3


def test_loaded_again_by_post_models(repository, caching_root):
    for factor in (2, 3):
        package = write_factor(caching_root / f"posted{factor}", factor)
        repository.client.load_model("posted", package)
        assert repository.infer("posted", 1.0) == [factor]
        repository.client.unload_model("posted")


def test_requests_config_may_ask_for_the_cache(repository, caching_root):
    config = {**CONFIG, "response_cache": {"enable": True}}
    for factor in (2, 3, 4):
        write_factor(caching_root / "asked", factor, PLAIN)
        code = (caching_root / "asked" / "1" / "model.py").read_bytes()
        assert repository.load_files("asked", {"1/model.py": code}, config).status == 200
        assert repository.infer("asked", 1.0) == [factor]


def test_steps_of_an_ensemble_are_cached_apart(repository, caching_root):
    for factor in (2, 3):
        package = caching_root / f"steps{factor}"
        write_factor(package / "step", factor)
        (package / "entry").mkdir(parents=True)
        (package / "entry" / "config.pbtxt").write_text(ENSEMBLE)
        repository.client.load_model("steps", package)
        assert repository.infer("steps", 1.0) == [factor]
        repository.client.unload_model("steps")


def test_helper_called_by_its_name_is_not_cached(repository, caching, caching_root):
    """It keeps its own name, which Python code may have written down."""
    for factor in (2, 3):
        package = caching_root / f"helped{factor}"
        write_factor(package / "helper", factor)
        write_python_model(package / "entry", answer=CALLING)
        repository.client.load_model("helped", package)
        assert repository.infer("helped", 1.0) == [factor]
        repository.client.unload_model("helped")
    warned = caching.wait_for("model.package_odd", model_id="helped")
    assert "response_cache is off" in warned["warnings"][0]


def test_old_version_never_answers_for_the_new(repository, store):
    def answer() -> float:
        reply = repository.client.call_endpoint("renewed")
        assert reply.status == 200, reply.body
        return reply.data[0]

    for factor in (2, 3, 4):
        write_factor(store / "renewed", factor)
        wait_until(lambda: answer() == factor, 30, f"version {factor} answers")  # noqa: B023
    repository.client.unload_model("renewed")
    write_factor(store / "renewed", 5)
    assert answer() == 5


def test_cached_model_has_its_callers_name(repository, caching, caching_root):
    answer = "if values[0] < 0:\n    raise ValueError('odd')"
    write_python_model(caching_root / "named", answer=answer, config=CACHED)
    assert repository.load("named").status == 200
    client = repository.client
    for call in ("", "/config"):
        assert client.get(f"/v2/models/named{call}").json()["name"] == "named"
    assert client.get("/v2/models/named/stats").json()["model_stats"][0]["name"] == "named"
    assert client.get("/v2/models/named/ready").status == 200
    assert [each["name"] for each in repository.index()] == ["named"]
    assert client.post("/v2/models/named/infer", infer_body(1.0)).json()["model_name"] == "named"
    with calls_to(caching.grpc) as calls:
        assert calls.infer("named", 1.0) == [1.0]
        _, text = calls.refused_infer("named", -1.0)
    # another input: Triton 2.51 keeps a failure in its cache, as an answer without outputs
    failure = client.post("/v2/models/named/infer", infer_body(-2.0)).json()
    assert failure["model_name"] == "named"
    assert [each for each in (text, failure["error"]) if "ta.c." in each] == []
    write_python_model(caching_root / "named", initialize="raise ValueError", config=CACHED)
    assert "ta.c." not in repository.load("named").error


def test_exchange_is_seen_behind_an_external_triton(caching, caching_root):
    adapter = uploading_adapter(caching, caching_root)
    with adapter.client() as client:
        for factor in (2, 3):
            package = write_factor(caching_root / f"uploaded{factor}", factor)
            client.load_model("uploaded", package)
            assert Repository(client).infer("uploaded", 1.0) == [factor]
            client.unload_model("uploaded")
    assert adapter.stop() == 0, adapter.errors


def test_unloaded_names_leave_nothing_in_triton(repository, caching, caching_root):
    """Each load has a name of its own there: nothing may grow with their number."""
    package = write_factor(caching_root / "often", 2)
    for _ in range(3):
        repository.client.load_model("often", package)
        repository.client.unload_model("often")
    with triton_client(caching) as raw:
        index = raw.post("/v2/repository/index", {}).json()
    assert [each["name"] for each in index if each["name"].startswith("ta.c.")] == []
    assert [path for path in caching.repository.iterdir() if path.name.startswith("ta.")] == []
