"""Any text of up to 1024 bytes is a model name; nothing of it reaches a path, a shell or Triton."""

import gzip
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.asking import model_names, quoted, refusal, triton_index
from tests.cases import rows
from tests.processes import arguments, stubs
from tests.running import COMPLETE, Client, Reply, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_NAMES = {
    "slashes": "team/a/b.tar.gz",
    "percent": "100%25 %zz % a+b:c?d=e#f",
    "shell": "$(touch shell-was-here)`touch shell-was-here`;touch shell-was-here;&|<>*",
    "newlines": " one\ntwo\r\nthree\t 模型 🐟 ",
    "bytes-1024": "é" * 512,
    "dot": ".",
    "dots": "..",
    "private-prefix": "ta.u.x",
    "json": '\'a\' b\\c\\u0041","model_name":"other',
}
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


Named = tuple[RunningAdapter, dict[str, Reply], Path]


@pytest.fixture(scope="module")
def named(model_root) -> Iterator[Named]:
    """A model under every one of the names, and what each load was answered.

    On an adapter of its own: a model that cannot be unloaded would be in the way of other tests.
    """
    folder = write_python_model(model_root / "named")
    with embedded_adapter(f"--model-roots={model_root}", COMPLETE) as adapter:

        def load(name: str) -> Reply:
            with adapter.client() as client:
                return client.load(name, folder)

        with ThreadPoolExecutor(8) as pool:
            loads = dict(zip(_NAMES.values(), pool.map(load, _NAMES.values()), strict=True))
        yield adapter, loads, folder


@pytest.fixture
def asking(named) -> Iterator[Client]:
    with named[0].client() as client:
        yield client


@rows("name", _NAMES.values())
def test_model_of_any_name_is_loaded_and_invoked(named, asking, name):
    _, loads, folder = named
    path = f"/models/{quoted(name)}"
    described = {"modelName": name, "modelUrl": str(folder)}

    assert (loads[name].status, loads[name].json()) == (200, described)
    assert refusal(asking.load(name, folder)) == (409, "AlreadyLoaded", name)
    assert asking.get(path).json() == described
    assert name in model_names(asking)
    for packed in ("", "gzip"):
        invoked = asking.post(f"{path}/invoke", infer_body(1.5), {"Accept-Encoding": packed})
        is_packed = invoked.headers.get("Content-Encoding") == "gzip"
        answer = json.loads(gzip.decompress(invoked.body) if is_packed else invoked.body)
        assert (answer["model_name"], answer["outputs"][0]["data"]) == (name, [1.5])


def test_refused_inference_has_the_callers_model_name(asking):
    body = infer_body(1.0)
    body["inputs"][0]["name"] = "OTHER"

    reply = asking.post(f"/models/{quoted('team/a/b.tar.gz')}/invoke", body)

    assert refusal(reply) == (400, "InvalidRequest", "team/a/b.tar.gz")
    assert "ta.u" not in reply.error


def test_triton_disk_and_processes_see_safe_names(named):
    """No shell ever ran one."""
    adapter, _, folder = named
    ready = {name for name, state in triton_index(adapter).items() if state == "READY"}
    folders = {path.name for path in adapter.repository.iterdir()}

    assert len(ready) == len(_NAMES)
    assert ready == folders
    assert all(_SAFE.fullmatch(name) for name in ready)
    for name in ready:
        (stub,) = stubs(adapter, name)
        said = " ".join(arguments(stub))
        assert "shell-was-here" not in said or "ta.u." in said
    assert "ta.u.x" not in ready  # that is ours to give
    places = [Path.cwd(), adapter.repository, adapter.repository.parent, folder, folder / "1"]
    assert not [place for place in places if (place / "shell-was-here").exists()]


def test_dots_in_raw_path_are_names(asking):
    for dots in (".", ".."):
        assert asking.get(f"/models/{dots}").json()["modelName"] == dots


def test_a_name_of_1025_bytes_is_refused_everywhere(asking, model_root):
    name = "é" * 512 + "x"
    path = f"/models/{quoted(name)}"

    replies = [asking.load(name, model_root / "named"), asking.get(path), asking.delete(path)]
    replies.append(asking.post(f"{path}/invoke", infer_body(1.0)))

    assert {refusal(reply)[:2] for reply in replies} == {(400, "InvalidRequest")}


@pytest.mark.parametrize("raw", ["%FF", "a%C3", "%00", "%ED%A0%80"])
def test_path_that_is_not_utf8_is_refused(asking, raw):
    assert refusal(asking.get(f"/models/{raw}"))[:2] == (400, "InvalidRequest")
    assert refusal(asking.delete(f"/models/{raw}"))[:2] == (400, "InvalidRequest")
    assert refusal(asking.post(f"/models/{raw}/invoke", b"{}"))[:2] == (400, "InvalidRequest")


def test_names_are_not_normalised(asking, model_root):
    asking.load_model("caf\u00e9", model_root / "named")

    assert asking.get(f"/models/{quoted('caf' + chr(0xE9))}").status == 200
    assert asking.get(f"/models/{quoted('cafe' + chr(0x301))}").status == 404
    assert asking.get(f"/models/{quoted('CAF' + chr(0xC9))}").status == 404


def unload(adapter: RunningAdapter, name: str) -> None:
    path = f"/models/{quoted(name)}"
    with adapter.client() as client:
        unloaded = client.delete(path)
        assert (unloaded.status, unloaded.json()) == (200, {"modelName": name})
        assert refusal(client.get(path)) == (404, "ModelNotFound", name)
        assert refusal(client.delete(path)) == (404, "ModelNotFound", name)
        invoked = client.post(f"{path}/invoke", infer_body(1.0))
        assert refusal(invoked) == (404, "ModelNotFound", name)


def test_z_models_of_all_names_are_unloaded(named, asking):
    with ThreadPoolExecutor(8) as pool:
        unloads = [pool.submit(unload, named[0], name) for name in _NAMES.values()]
    failures = [failure for each in unloads if (failure := each.exception())]

    assert failures == []
    assert not set(_NAMES.values()) & set(model_names(asking))
