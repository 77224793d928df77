"""The model repository extension over REST, at an adapter with an embedded Triton."""

import base64
import gzip
import json
import tarfile

import pytest

from tests.asking import background, refusal
from tests.cases import rows
from tests.journeys.v2.calls import CONFIG, Repository
from tests.running import wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

DOUBLING = "values = 2 * values"
LOAD = "/v2/repository/models/m/load"
CALLS = ("index", "models/m/load", "models/m/unload")


@pytest.fixture
def code(tmp_path) -> bytes:
    return (write_python_model(tmp_path, answer=DOUBLING) / "1" / "model.py").read_bytes()


def states(repository: Repository) -> dict[str, str]:
    return {model["name"]: model["state"] for model in repository.index()}


def test_load_without_parameters_uses_the_named_folder(repository, identity):
    reply = repository.load(identity.name)
    assert (reply.status, reply.json()) == (200, {})
    assert repository.index() == [
        {"name": identity.name, "version": "1", "state": "READY", "reason": ""}
    ]
    assert repository.infer(identity.name, 1.5) == [1.5]
    body = {"parameters": {"unload_dependents": True}}
    assert repository.unload(identity.name, body).status == 200
    assert repository.index() == []


def test_a_load_of_a_loaded_model_is_done(repository, identity, client):
    client.load_model("any name", identity)
    assert repository.load("any name").status == 200
    assert repository.index({"ready": True})[0]["name"] == "any name"


def test_load_of_replaced_archive_gets_the_new(repository, package, model_root):
    def pack(answer: str) -> None:
        write_python_model(package, answer=answer)
        with tarfile.open(archive, "w") as writing:
            writing.add(package, ".")

    archive = model_root / f"{package.name}.tar"
    pack("pass")
    assert repository.load(archive.name).status == 200
    pack(DOUBLING)
    assert repository.load(archive.name).status == 200
    assert repository.infer(archive.name, 1.5) == [3.0]


def test_load_of_earlier_archive_gets_the_earlier(repository, package, model_root, tmp_path):
    """Moving keeps the time of its content, which is before that of the first load."""
    archive = model_root / f"{package.name}.tar"
    earlier = tmp_path / "earlier.tar"
    for path, answer in ((earlier, "pass"), (archive, DOUBLING)):
        write_python_model(package, answer=answer)
        with tarfile.open(path, "w") as writing:
            writing.add(package, ".")
    assert repository.load(archive.name).status == 200
    assert repository.infer(archive.name, 1.5) == [3.0]
    earlier.replace(archive)
    assert repository.load(archive.name).status == 200
    assert repository.infer(archive.name, 1.5) == [1.5]


def test_a_forced_reload_loads_the_same_files_again(repository, package):
    write_python_model(
        package,
        imports="import time",
        initialize="self.begun = time.monotonic_ns() % 1000003",
        answer="values = values * 0 + self.begun",
    )
    assert repository.load(package.name).status == 200
    first = repository.infer(package.name, 1.0)
    assert repository.load(package.name).status == 200
    assert repository.infer(package.name, 1.0) == first
    assert repository.load(package.name, force_reload=False).status == 200
    assert repository.infer(package.name, 1.0) == first
    assert repository.load(package.name, force_reload=True).status == 200
    assert repository.infer(package.name, 1.0) != first


def test_second_load_waits_for_the_first(repository, package, adapter, gate):
    """The index says that it is loading."""
    write_python_model(package, initialize=gate.statements)
    with background(adapter) as others:
        first = others.ask(lambda own: Repository(own).load(package.name))
        gate.wait_reached()
        assert states(repository) == {package.name: "LOADING"}
        assert repository.index({"ready": True}) == []
        second = others.ask(lambda own: Repository(own).load(package.name))
        gate.open()
        assert (first.result().status, second.result().status) == (200, 200)
    assert states(repository) == {package.name: "READY"}


def test_model_without_process_is_unavailable_with_reason(repository, package):
    write_python_model(package, imports="import os", answer="os._exit(1)")
    assert repository.load(package.name).status == 200
    assert repository.client.invoke(package.name).status == 500
    (entry,) = repository.index()
    assert (entry["state"], "lost its process" in entry["reason"]) == ("UNAVAILABLE", True)
    assert repository.unload(package.name).status == 200


def test_each_version_that_triton_lists_is_an_entry(repository, package):
    write_python_model(package, config=_ALL_VERSIONS)
    write_python_model(package, config=_ALL_VERSIONS, version="3")
    assert repository.load(package.name).status == 200
    assert [(m["name"], m["version"]) for m in repository.index()] == [
        (package.name, "1"),
        (package.name, "3"),
    ]


_ALL_VERSIONS = """\
backend: "python"
version_policy { all {} }
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""


def test_files_of_the_request_are_the_model(repository, code, client, adapter):
    assert repository.load_files("my model", {"1/model.py": code}).status == 200
    assert repository.infer("my model", 1.0, 2.0) == [2.0, 4.0]
    url = client.get("/models/my%20model").json()["modelUrl"]
    assert url.startswith("request:")
    assert repository.unload("my model").status == 200
    left = [p for p in adapter.repository.iterdir() if p.name.startswith("ta.")]
    assert left == []


def test_config_may_be_object_and_files_deeper(repository, code):
    code = code.replace(b"values = 2 * values", b"values = values + len(open(data).read())")
    code = b"import os\ndata = os.path.join(os.path.dirname(__file__), 'a', 'b.txt')\n" + code
    files = {
        "file:1/model.py": base64.b64encode(code).decode(),
        "file:1/a/b.txt": base64.b64encode(b"four").decode(),
    }
    assert repository.load("m", config=CONFIG, **files).status == 200
    assert repository.infer("m", 1.0) == [5.0]


def test_same_files_change_nothing_and_others_replace(repository, code, adapter):
    def is_unloaded() -> bool:
        unloaded = adapter.events("model.unloaded")
        return any("replaced" in {line["model_id"], line.get("replaced_by")} for line in unloaded)

    assert repository.load_files("replaced", {"1/model.py": code}).status == 200
    assert repository.load_files("replaced", {"1/model.py": code}).status == 200
    assert repository.load("replaced").status == 200
    assert repository.infer("replaced", 1.0) == [2.0]
    assert not is_unloaded()
    tripling = code.replace(b"2 * values", b"3 * values")
    assert repository.load_files("replaced", {"1/model.py": tripling}).status == 200
    wait_until(is_unloaded, 30, "the log has it")
    assert repository.infer("replaced", 1.0) == [3.0]


def test_config_replaces_the_folders(repository, package, adapter):
    write_python_model(package, initialize="self.config = args['model_config']", config="broken {")
    assert repository.client.load("broken", package).status == 400
    assert repository.load(package.name, config=json.dumps(CONFIG)).status == 200
    assert repository.infer(package.name, 1.0) == [1.0]
    assert (package / "config.pbtxt").read_text() == "broken {"
    assert repository.unload(package.name).status == 200
    assert package.name not in {path.name for path in adapter.repository.iterdir()}
    assert (package / "1" / "model.py").exists()


def test_a_config_is_none_for_an_archive(repository, model_root, tmp_path):
    with tarfile.open(model_root / "packed.tar", "w") as packed:
        packed.add(write_python_model(tmp_path), ".")
    reply = repository.load("packed.tar", config=CONFIG)
    assert refusal(reply) == (400, "InvalidRequest", "packed.tar")
    assert "archive" in reply.error


B64 = base64.b64encode(b"x").decode()


@rows(
    ("parameters", "words"),
    [
        ({"colour": 1, "shape": 2}, ["'colour'", "'shape'"]),
        ({"force_reload": "yes"}, ["force_reload must be true or false"]),
        ({"file:1/model.py": B64}, ["need the parameter config"]),
        ({"config": "{"}, ["config is not JSON"]),
        ({"config": 7}, ["config must be JSON text or an object"]),
        ({"config": None}, ["config must be JSON text or an object"]),
        ({"config": "[]"}, ["config must be a JSON object"]),
        ({"config": {"inputs": [], "backend": "x"}}, ["inputs"]),
        ({"config": {"input": [{"nam": "x"}], "x": 1}}, ["input.nam", "x"]),
        ({"config": {"max_batch_size": "many"}}, ["max_batch_size"]),
        ({"config": {"input": 7}}, ["config is not a ModelConfig"]),
        ({"config": {"backend": "\ud800"}}, ["config is not a ModelConfig"]),
        ({"config": CONFIG, "file:1/model.py": "%%"}, ["is not base64"]),
        ({"config": CONFIG, "file:1/model.py": 1}, ["must be base64"]),
        ({"config": CONFIG, "file:1/a": B64, "file:1/a/b": B64}, ["both a file and a folder"]),
    ],
)
def test_senseless_load_is_refused_by_name(repository, parameters, words):
    reply = repository.load("m", **parameters)
    assert refusal(reply) == (400, "InvalidRequest", "m")
    assert [word for word in words if word not in reply.error] == []


@rows(
    "path",
    [
        *("", "model.py", "1", "1/", "/1/m", "1//m", "1/../m", "1/./m", "../1/m", "0/m", "01/m"),
        *("-1/m", "x/m", "9" * 19 + "/m", "1/" + "n" * 256, "1/" + "n/" * 600 + "n", "1/a\0b"),
        *("1/\ud800", "1/a\nb", "\u0661/m"),
    ],
)
def test_files_must_lie_below_a_version(repository, path):
    reply = repository.load("m", **{"config": CONFIG, f"file:{path}": B64})
    assert refusal(reply) == (400, "InvalidRequest", "m")
    assert "is not file:<version>/<file-name>" in reply.error


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b'{"parameters": 1}'])
@rows("call", CALLS)
def test_a_body_is_a_json_object(repository, call, body):
    if call == "index" and b"parameters" in body:
        body = b'{"ready": 1}'
    reply = repository.client.post(f"/v2/repository/{call}", body)
    assert refusal(reply)[:2] == (400, "InvalidRequest")


@rows("path", ["/models", *(f"/v2/repository/{call}" for call in CALLS)])
def test_compressed_control_body_is_refused(repository, path):
    body = gzip.compress(b"{}")
    reply = repository.client.post(path, body, {"Content-Encoding": "gzip"})
    assert refusal(reply)[:2] == (400, "InvalidRequest")
    assert reply.error == "a body of this call must not be compressed"


@rows("parameters", [{"unload_dependents": 1}, {"force": True}])
def test_an_unload_takes_one_parameter(repository, parameters):
    reply = repository.unload("m", {"parameters": parameters})
    assert refusal(reply) == (400, "InvalidRequest", "m")
    assert next(iter(parameters)) in reply.error


@rows("name", ["absent", "n" * 1000])
def test_folder_in_no_model_root_is_missing(repository, name):
    assert refusal(repository.load(name)) == (404, "SourceMissing", name)


@rows("name", ["..", "a/b", "/etc"])
def test_name_without_files_is_a_folder(repository, name):
    assert refusal(repository.load(name)) == (400, "InvalidRequest", name)


def test_files_may_be_larger_than_other_control_bodies(repository, code, client):
    files = {"1/model.py": code, "1/weights": bytes(2 * 2**20)}
    assert repository.load_files("m", files).status == 200
    assert client.post("/v2/repository/index", b" " * (2**20 + 1)).status == 413
    assert client.post(LOAD, b" " * (64 * 2**20 + 1)).status == 413


def test_left_load_is_not_done_again(adapter, repository, tmp_path, gate):
    """A client whose time limit is below the load's, and who tries again."""
    slow = write_python_model(tmp_path, initialize=gate.statements)
    files = {"1/model.py": (slow / "1" / "model.py").read_bytes()}
    for seconds in (0.5, 20):  # the second where the first was too short to begin the load
        with adapter.client(seconds) as hasty, pytest.raises(TimeoutError):
            Repository(hasty).load_files("hasty", files)
        if gate.reached.exists():
            break
    gate.open()
    wait_until(lambda: states(repository) == {"hasty": "READY"}, 30, "the load went on")
    assert repository.load_files("hasty", files).status == 200
    unloaded = adapter.events("model.unloaded")
    assert not any(line["model_id"] == "hasty" for line in unloaded)
    assert repository.infer("hasty", 1.5) == [1.5]
