"""Models that compute something before their load is answered, on a real Triton.

The models here are made ready by their first request, as many are, and write down what they do.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.asking import refusal
from tests.grpc_calls import write_decoupled_model
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

_TWO = """\
backend: "python"
max_batch_size: 4
input [
  { name: "TEXT" data_type: TYPE_STRING dims: [2, -1] },
  { name: "IN" data_type: TYPE_INT64 dims: [3] },
  { name: "NOT" data_type: TYPE_FP32 dims: [1] optional: true }
]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""
_TWO_ANSWER = """\
import numpy
note(repr([t.as_numpy().tolist() for t in request.inputs()]))
values = numpy.zeros((1, 1), dtype=numpy.float32)
"""
_OWN = """\
model_warmup {
  name: "own"
  batch_size: 1
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [3] zero_data: true } }
}
"""
_SEQUENCE = "sequence_batching { max_sequence_idle_microseconds: 5000000 }\n"
_FULL = 'raise pb_utils.TritonModelException("Out of memory. Tried to allocate 2.00 GiB")'


class Written:
    """What models of this test have done, in order."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def model(self, folder: Path, *, answer: str = "", config: str = CONFIG) -> Path:
        note = f"""
            def note(what):
                with open({str(self.file)!r}, "a") as file:
                    file.write(what + "\\n")
        """
        first = 'if not hasattr(self, "ready"):\n    self.ready = True\n    note("made ready")\n'
        noted = first + (answer or "note(repr(values.tolist()))")
        return write_python_model(folder, imports=note, answer=noted, config=config)

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def warming(root: Path) -> Iterator[RunningAdapter]:
    store = root / "store"
    store.mkdir()
    flags = (f"--model-roots={root}", f"--model-store={store}", f"--cache-dir={root / 'cache'}")
    with embedded_adapter("--warm-up=zeros", COMPLETE, *flags) as adapter:
        yield adapter


@pytest.fixture
def client(warming: RunningAdapter) -> Iterator[Client]:
    with closing(warming.client()) as client:
        yield client


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "written")


def test_model_computes_zeros_before_load_is_answered(
    warming: RunningAdapter, client: Client, root: Path, written: Written
) -> None:
    assert client.load("plain", written.model(root / "plain")).status == 200
    assert written.lines == ["made ready", "[0.0]"]
    assert warming.wait_for("model.warmed_up", model_id="plain")["seconds"] > 0


def test_called_model_computes_zeros_before_the_call(
    client: Client, root: Path, written: Written
) -> None:
    written.model(root / "store" / "called")
    call = client.post("/endpoints/default/invocations", infer_body(7.0), _target("called"))
    assert call.status == 200, call.body
    assert written.lines == ["made ready", "[0.0]", "[7.0]"]


def _target(name: str) -> dict[str, str]:
    kind = "application/json"
    return {"X-Amzn-SageMaker-Target-Model": name, "Content-Type": kind}


def test_warm_up_zeros_are_of_least_shape(client: Client, root: Path, written: Written) -> None:
    """One batch, with empty strings and nothing optional."""
    package = written.model(root / "two", answer=_TWO_ANSWER, config=_TWO)
    assert client.load("two", package).status == 200
    assert written.lines == ["made ready", "[[[[b''], [b'']]], [[0, 0, 0]]]"]


def test_own_warm_up_is_the_only_one(
    warming: RunningAdapter, client: Client, root: Path, written: Written
) -> None:
    package = written.model(root / "own", config=CONFIG + _OWN)
    assert client.load("own", package).status == 200
    assert written.lines == ["made ready", "[0.0, 0.0, 0.0]"]
    skipped = warming.wait_for("model.warm_up_skipped", model_id="own")
    assert "model_warmup" in skipped["reason"]


def test_sequence_and_decoupled_models_skip_warm_up(
    warming: RunningAdapter, client: Client, root: Path, written: Written
) -> None:
    sequence = written.model(root / "sequence", config=CONFIG + _SEQUENCE)
    streams = write_decoupled_model(
        root / "streams", answer=f"pathlib.Path({str(written.file)!r}).touch()"
    )
    for name, package, reason in (
        ("sequence", sequence, "sequence batching"),
        ("streams", streams, "decoupled"),
    ):
        assert client.load(name, package).status == 200
        skipped = warming.wait_for("model.warm_up_skipped", model_id=name)
        assert reason in skipped["reason"]
    assert written.lines == []


def test_model_failing_on_zeros_is_still_served(
    warming: RunningAdapter, client: Client, root: Path, written: Written
) -> None:
    """The log says why."""
    divides = 'if not values.all():\n    raise pb_utils.TritonModelException("no zeros please")\n'
    package = written.model(root / "picky", answer=divides)
    assert client.load("picky", package).status == 200
    failed = warming.wait_for("model.warm_up_failed", model_id="picky")
    assert "no zeros please" in failed["reason"]
    assert client.post("/models/picky/invoke", infer_body(2.0)).status == 200


def test_inputs_over_64_mib_skip_warm_up(
    warming: RunningAdapter, client: Client, root: Path, written: Written
) -> None:
    for dims, taken in (("[1000000, 17]", "64.8 MiB"), ("[1000000000, 1000000000]", "TiB")):
        name = f"large-{taken[-3:]}"
        package = written.model(root / name, config=CONFIG.replace("[-1]", dims, 1))
        assert client.load(name, package).status == 200
        failed = warming.wait_for("model.warm_up_failed", model_id=name)
        assert taken in failed["reason"]
        assert "at most" in failed["reason"]
    assert written.lines == []


def test_warm_up_out_of_memory_is_loads_507(
    client: Client, warming: RunningAdapter, root: Path, written: Written
) -> None:
    """It leaves nothing."""
    refused = client.load("full", written.model(root / "full", answer=_FULL))
    assert (refused.status, refused.json()["code"]) == (507, "OutOfMemory")
    assert client.get("/models/full").status == 404
    assert not (warming.repository / "full").exists()


def test_model_dying_in_warm_up_is_not_loaded(client: Client, root: Path, written: Written) -> None:
    dies = "import os\nos._exit(1)"
    refused = client.load("dies", written.model(root / "dies", answer=dies))
    assert refusal(refused)[:2] == (400, "InvalidModel")
    assert "ended during its warm-up" in refused.json()["error"]
    assert client.get("/models/dies").status == 404


def test_warm_up_memory_counts_in_learned_size(
    client: Client, warming: RunningAdapter, root: Path, written: Written
) -> None:
    keeps = "import numpy\nself.kept = numpy.ones(96 * 2**20, dtype=numpy.uint8)"
    assert client.load("keeps", written.model(root / "keeps", answer=keeps)).status == 200
    (model,) = [m for m in warming.state()["models"] if m["model_id"] == "keeps"]
    assert model["bytes"]["host"] > 96 * 2**20, model


def test_default_warm_up_is_the_configs(root: Path, written: Written) -> None:
    with (
        embedded_adapter(f"--model-roots={root}", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        passed_over = CONFIG + _OWN.replace("batch_size: 1", "batch_size: 0")
        assert client.load("plain", written.model(root / "plain")).status == 200
        assert (
            client.load("passed", written.model(root / "passed", config=passed_over)).status == 200
        )
        assert written.lines == []
        package = written.model(root / "configured", config=CONFIG + _OWN)
        assert client.load("configured", package).status == 200
        assert written.lines == ["made ready", "[0.0, 0.0, 0.0]"]
