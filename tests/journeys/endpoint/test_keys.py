"""What callers are told of the models of a store, and what a key may be: the real command, a real
Triton and a folder as the store.
"""

import json

import pytest

from tests.packages.models import pack
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


def model_error(caller, key: str) -> str:
    """The model's own words in a ModelError."""
    status, refusal = caller.refused(key)
    assert (status, refusal["OriginalStatusCode"]) == (424, 400), refusal
    return json.loads(refusal["OriginalMessage"])["error"]


def test_package_without_model_says_what_to_give(start, store, tmp_path):
    """Triton would take the end of a key for a backend, `gz`, and say that it lacks that."""
    (store.path / "lone").mkdir()
    code = write_python_model(tmp_path / "draft") / "1/model.py"
    code.rename(store.path / "lone/model.py")
    (store.path / "notes.txt").write_text("no model")
    store.put("good.tar.gz", 1)
    (store.path / "folder").mkdir()
    (store.path / "good.tar.gz").rename(store.path / "folder/inner.tar.gz")
    write_python_model(tmp_path / "deeper" / "a/b/c/d")
    pack(tmp_path / "deeper", store.path / "deep.tar.gz")
    caller = start()

    assert "expected 0 inputs" in model_error(caller, "lone/model.py"), "it has no config"
    assert caller.loaded() == ["lone/model.py"]
    reason = model_error(caller, "notes.txt")
    assert "notes.txt: add a config.pbtxt, or name the file as below; it is no model file" in reason
    assert "*.onnx" in reason
    assert ".tar.gz" in reason
    hint = "give the content of inner.tar.gz itself, which is not unpacked"
    assert hint in model_error(caller, "folder")
    reason = model_error(caller, "deep.tar.gz")
    assert reason.startswith("deep.tar.gz: give the folder a/b/c/d itself")
    assert "backend '" not in reason


def test_answers_have_no_path_of_the_machine(start, store, tmp_path):
    """The log says where the store is."""
    store.put("team/a.tar.gz", 1)
    (store.path / "broken.tar.gz").write_bytes(b"no archive")
    (store.path / "out").symlink_to("/etc")
    (store.path / "locked").write_bytes(b"x")
    caller = start()
    caller.invoke("team/a.tar.gz")
    answers = [caller.refused(key) for key in ("missing", "broken.tar.gz", "out", "locked")]
    assert "key: missing" in answers[0][1]["Message"]
    assert "key: broken.tar.gz" in answers[1][1]["Message"]
    (store.path).rename(store.path.with_name("away"))
    answers.append(caller.refused("other"))
    assert [status for status, _ in answers] == [400, 400, 400, 424, 503]
    answers.append((200, caller.http.get("/models").json()))
    answers.append((200, caller.http.get("/models/team%2Fa.tar.gz").json()))
    assert not [each for each in answers if str(tmp_path) in str(each) or "/tmp" in str(each)]
    assert answers[-1][1] == {"modelName": "team/a.tar.gz", "modelUrl": "team/a.tar.gz"}
    (opened,) = caller.adapter.events("artifact.cache_opened")
    assert opened["stores"] == {"": str(store.path)}
