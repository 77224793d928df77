"""V2 loads of a model that is loaded, with other files or another config: they may fail, and the
model that was there serves on.
"""

import json
import tarfile
from collections.abc import Callable, Iterator

import pytest

from tests.asking import background, refusal
from tests.cases import rows
from tests.grpc_calls import Calls, calls_to, load_request
from tests.journeys.v2.calls import CONFIG, Repository
from tests.running import Client, RunningAdapter
from tests.trees import CONFIG as PLAIN
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

DOUBLING = "values = 2 * values"
BROKEN = "raise ValueError('no such luck')"
SEQUENCES = {**CONFIG, "sequence_batching": {"max_sequence_idle_microseconds": 600_000_000}}
# A model that keeps the state of sequences is never there twice: it is updated in place.
IN_PLACE = json.dumps(SEQUENCES)


@pytest.fixture
def code(tmp_path) -> Callable[..., bytes]:
    """Returns the Python of a model whose parts are as given."""

    def written(**parts: str) -> bytes:
        return (write_python_model(tmp_path / "code", **parts) / "1" / "model.py").read_bytes()

    return written


@pytest.fixture
def calls(adapter) -> Iterator[Calls]:
    with calls_to(adapter.grpc) as found:
        yield found


def infer_in_sequence(client: Client, name: str, value: float) -> list[float]:
    parameters = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    reply = client.post(f"/v2/models/{name}/infer", {**infer_body(value), "parameters": parameters})
    assert reply.status == 200, reply.body
    return reply.data


def read_state(adapter: RunningAdapter) -> tuple[set[str], dict[str, str]]:
    """Return the names of the staged folders, and the states of the models."""
    models = {each["model_id"]: each["state"] for each in adapter.state()["models"]}
    return {path.name for path in adapter.repository.iterdir()}, models


@rows(
    "config",
    [
        {"backend": "python", "max_batch_size": -1},
        {**CONFIG, "backend": "no-such-backend"},
        {**CONFIG, "input": [{"name": "IN", "data_type": "TYPE_FP32"}]},
    ],
)
def test_refused_config_leaves_the_loaded_model(repository, identity, adapter, calls, config):
    assert repository.load(identity.name).status == 200
    before = read_state(adapter)
    reply = repository.load(identity.name, config=config)
    assert refusal(reply) == (400, "InvalidModel", identity.name)
    request = load_request(identity.name, config=json.dumps(config))
    code, _ = calls.refused("RepositoryModelLoad", request)
    assert code in {"INVALID_ARGUMENT", "INTERNAL"}  # by the adapter, or by Triton
    assert repository.infer(identity.name, 1.5) == [1.5]
    assert read_state(adapter) == before


def test_changed_files_that_fail_leave_the_loaded_model(repository, package, adapter):
    write_python_model(package, answer=DOUBLING)
    assert repository.load(package.name).status == 200
    before = read_state(adapter)
    (package / "config.pbtxt").write_text("name: [")
    assert refusal(repository.load(package.name))[:2] == (400, "InvalidModel")
    write_python_model(package, initialize=BROKEN)
    for parameters in ({}, {"force_reload": True}, {"config": json.dumps(CONFIG)}):
        reply = repository.load(package.name, **parameters)
        assert refusal(reply) == (400, "InvalidModel", package.name)
        assert "no such luck" in reply.error
        assert f"{package.name}#" not in reply.error, "a name of the adapter's own"
        assert repository.infer(package.name, 1.5) == [3.0]
        assert read_state(adapter) == before
    write_python_model(package, answer="values = 3 * values")
    assert repository.load(package.name).status == 200
    assert repository.infer(package.name, 1.5) == [4.5]


def test_calls_are_answered_while_a_model_is_updated(repository, package, adapter, gate):
    write_python_model(package, answer=DOUBLING)
    assert repository.load(package.name).status == 200
    write_python_model(package, initialize=gate.statements)
    with background(adapter) as others:
        loading = others.ask(lambda own: Repository(own).load(package.name))
        try:
            gate.wait_reached()
            assert repository.infer(package.name, 1.5) == [3.0]
            index = repository.index()
            assert [(m["name"], m["state"]) for m in index] == [(package.name, "READY")]
        finally:
            gate.open()
        assert loading.result().status == 200
    assert repository.infer(package.name, 1.5) == [1.5]
    names = [m["modelName"] for m in repository.client.get("/models").json()["models"]]
    assert names == [package.name]


def test_updated_model_keeps_its_name_for_callers(repository, package, calls):
    write_python_model(package, answer=DOUBLING)
    for factor in (2, 30, 400):  # of other lengths, by which Python knows its bytecode
        write_python_model(package, answer=f"values = {factor} * values")
        assert repository.load(package.name).status == 200
        path = f"/v2/models/{package.name}"
        for call in ("", "/config"):
            assert repository.client.get(path + call).json()["name"] == package.name
        stats = repository.client.get(f"{path}/stats").json()["model_stats"]
        assert [each["name"] for each in stats] == [package.name]
        reply = repository.client.post(f"{path}/infer", infer_body(1.0)).json()
        assert (reply["model_name"], reply["outputs"][0]["data"]) == (package.name, [factor])
        assert calls.infer(package.name, 1.0) == [factor]
        assert [m["name"] for m in repository.index()] == [package.name]


def test_unload_ends_the_update_of_its_model(repository, package, adapter, gate):
    write_python_model(package)
    assert repository.load(package.name).status == 200
    write_python_model(package, initialize=gate.statements)
    with background(adapter) as others:
        loading = others.ask(lambda own: Repository(own).load(package.name))
        gate.wait_reached()
        assert repository.unload(package.name).status == 200
        assert repository.index() == []
        reply = loading.result()
    assert refusal(reply) == (409, "UnloadedMeanwhile", package.name)
    assert "was unloaded while it was being loaded" in reply.error
    folders, models = read_state(adapter)
    assert not [name for name in folders if name.startswith((package.name, "ta."))]
    assert models == {}


def test_two_updates_at_once_take_their_turns(repository, code, adapter):
    assert repository.load_files("m", {"1/model.py": code()}).status == 200
    slow = "import time; time.sleep(0.5)"
    files = [
        {"1/model.py": code(initialize=slow, answer=f"values = {factor} * values")}
        for factor in (2, 3, 2, 3)
    ]
    with background(adapter) as others:
        asked = [
            others.ask(lambda own, each=each: Repository(own).load_files("m", each))
            for each in files
        ]
        assert [each.result().status for each in asked] == [200] * 4
    assert repository.infer("m", 1.0)[0] in {2.0, 3.0}
    assert read_state(adapter)[1] == {"m": "READY"}


def test_failed_update_brings_the_model_back(repository, code, adapter, client):
    files = {"1/model.py": code(answer=DOUBLING)}
    assert repository.load_files("m", files, SEQUENCES).status == 200
    before = read_state(adapter)
    for broken in ({"1/model.py": code(initialize=BROKEN)}, {"1/other.py": b""}):
        reply = repository.load_files("m", broken, SEQUENCES)
        assert refusal(reply) == (400, "InvalidModel", "m"), reply.body
        assert infer_in_sequence(client, "m", 1.5) == [3.0]
    assert read_state(adapter) == before
    assert repository.load_files("m", files, SEQUENCES).status == 200  # which changes nothing
    assert infer_in_sequence(client, "m", 1.5) == [3.0]


def test_failed_archive_update_brings_the_model_back(repository, package, model_root, client):
    """What was unpacked of the one before is kept; the archive itself is another by now."""

    def pack(**parts: str) -> None:
        config = PLAIN + "sequence_batching { max_sequence_idle_microseconds: 600000000 }\n"
        write_python_model(package, config=config, **parts)
        with tarfile.open(archive, "w") as writing:
            writing.add(package, ".")

    archive = model_root / f"{package.name}.tar"
    pack(answer=DOUBLING)
    assert repository.load(archive.name).status == 200
    pack(initialize=BROKEN)
    for _ in range(2):  # the second load does not take the broken archive for the loaded one
        reply = repository.load(archive.name)
        assert refusal(reply) == (400, "InvalidModel", archive.name)
        assert infer_in_sequence(client, archive.name, 1.5) == [3.0]


def test_failed_config_update_brings_the_model_back(repository, package, client):
    """The config says what the code raises, so that only the new one fails."""
    initialize = "if 'mean' in args['model_config']: raise ValueError('no such luck')"
    write_python_model(package, initialize=initialize)
    assert repository.load(package.name, config=IN_PLACE).status == 200
    mean = {**SEQUENCES, "parameters": {"mean": {"string_value": "1"}}}
    reply = repository.load(package.name, config=json.dumps(mean))
    assert refusal(reply) == (400, "InvalidModel", package.name)
    assert "no such luck" in reply.error
    assert "loaded again" in reply.error
    assert infer_in_sequence(client, package.name, 1.5) == [1.5]


def test_irrecoverable_model_is_said_to_be_gone(repository, package, client):
    """Its files were written over, and Triton had to unload it before it read the new ones."""
    write_python_model(package)
    assert repository.load(package.name, config=IN_PLACE).status == 200
    write_python_model(package, initialize=BROKEN)
    reply = repository.load(package.name, config=IN_PLACE, force_reload=True)
    assert reply.status == 400
    assert "could not be loaded again" in reply.error
    assert client.post(f"/v2/models/{package.name}/infer", infer_body(1.0)).status == 404
