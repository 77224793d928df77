"""Broken packages of every kind: each is refused by file and reason, soon, and leaves no trace."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.models import (
    ask,
    books,
    load,
    names_in_triton,
    put,
    take_down,
    write_adding,
    write_calling,
    write_ensemble,
)
from tests.packages.zoo import ZOO, Animal, refused
from tests.running import Client, RunningAdapter
from tests.trees import CONFIG, write_python_model

pytestmark = pytest.mark.triton

GENEROUS_SECONDS = 30
PYTHON = 'backend: "python"\n'
IO = CONFIG.replace(PYTHON, "")


def configured(name: str, text: str | bytes, *said: str) -> None:
    """A python model whose only fault is its config."""

    def make(folder: Path) -> None:
        write_python_model(folder)
        (folder / "config.pbtxt").write_bytes(text if isinstance(text, bytes) else text.encode())

    make.__name__ = f"config_{name}"
    refused("config.pbtxt", *said)(make)


def described(name: str, schema: object, *said: str, config: str = CONFIG) -> None:
    """A python model whose only fault is its _schema.json."""

    def make(folder: Path) -> None:
        write_python_model(folder, config=config)
        raw = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
        (folder / "_schema.json").write_bytes(raw)

    make.__name__ = f"schema_{name}"
    refused(*said)(make)


configured("truncated", CONFIG[:-3], ":")
configured("empty", "", "is empty")
configured("of_blanks", " \n\t", "is empty")
configured("with_a_number_for_text", "backend: 3\n" + IO, ":1:10: ")
configured("with_text_for_a_number", CONFIG.replace(": 0", ': "no"'), ":2:")
configured("with_an_unknown_enum", CONFIG.replace("FP32", "FP33"), ":3:", "TYPE_FP33")
configured("with_a_list_for_one", CONFIG.replace('"python"', '["python", "x"]'), ":1:")
configured("not_utf8", b'backend: "\xff"', "not valid UTF-8", "0xff")
configured("utf16", CONFIG.encode("utf-16"), "not valid UTF-8")
configured("of_a_png", b"\x89PNG\r\n\x1a\n", "not valid UTF-8")
configured("too_big", CONFIG + "#" * 2**20, "larger than 1048576 bytes")
configured("too_deep", CONFIG + "x {" * 5000 + "}" * 5000, "nested too deeply")
configured("with_a_no_break_space", CONFIG.replace(" 0", "\u00a00"), "U+00A0")
configured("that_leaves_its_folder", CONFIG + 'default_model_filename: "../../x"', "leaves")
UNSIZED = f'{CONFIG}parameters {{ key: "memory_bytes" value {{ }} }}'
configured("with_a_wrong_size", UNSIZED, "memory_bytes", "write bytes or a number with KiB")
configured("with_a_surrogate", f'{CONFIG}default_model_filename: "\\ud800"', ":")

TENSOR = {"name": "IN", "datatype": "FP32", "shape": [-1]}
described("no_json", b"{", "_schema.json", "not valid JSON")
described("of_bytes", b"\xff\xfe\x00", "_schema.json", "not valid JSON")
described("a_list", [], "_schema.json", "not a JSON object")
described("deep", b"[" * 100_000, "_schema.json", "nested too deeply")
described("without_name", {"inputs": [{}]}, "_schema.json: inputs[0]", "no name")
described("odd_type", {"outputs": [TENSOR | {"datatype": "FP1"}]}, "outputs[0]", "FP1")
described("odd_shape", {"inputs": [TENSOR | {"shape": [0]}]}, "inputs[0]", "[0]")
described("twice", {"inputs": [TENSOR, TENSOR]}, "inputs[1]", "another 'IN'")
described(
    "conflict",
    {"inputs": [TENSOR | {"shape": [3]}]},
    *("conflicting model configuration", "max_batch_size 8"),
    config=CONFIG.replace("max_batch_size: 0", "max_batch_size: 8"),
)


@refused("does not exist", status=404)
def _absent(folder: Path) -> object:
    return folder / "absent"


@refused("holds no files")
def _empty_folder(folder: Path) -> None:
    pass


@refused("holds no files")
def _empty_version(folder: Path) -> None:
    (folder / "1").mkdir()


@refused("add a version folder such as 1", "config.pbtxt")
def _no_version(folder: Path) -> None:
    (folder / "config.pbtxt").write_text(CONFIG)


@refused("add a version folder such as 1", "it holds 0, 01, config.pbtxt, v2")
def _odd_versions(folder: Path) -> None:
    for version in ("0", "01", "v2"):
        write_python_model(folder, version=version)


@refused("99999999999999999999", "must be below 2**63")
def _huge_version(folder: Path) -> None:
    write_python_model(folder)
    (folder / ("9" * 20)).mkdir()


@refused("1/model.py: it is empty")
def _empty_model(folder: Path) -> None:
    write_python_model(folder)
    (folder / "1" / "model.py").write_text("")


@refused("model.py in version 1", "python needs it")
def _no_model(folder: Path) -> None:
    (folder / "1").mkdir()
    (folder / "1" / "other.py").write_text("x")
    (folder / "config.pbtxt").write_text(CONFIG)


@refused("config.pbtxt: Is a directory")
def _config_folder(folder: Path) -> None:
    (folder / "config.pbtxt").mkdir()


@refused("expected model.py; found a.txt, b.txt", status=400)
def _not_of_the_type(folder: Path) -> object:
    (folder / "a.txt").write_text("x")
    (folder / "b.txt").write_text("x")
    return {"model_type": "python"}


@refused("holds several models: a.onnx, b.onnx")
def _two_files(folder: Path) -> None:
    (folder / "a.onnx").write_text("x")
    (folder / "b.onnx").write_text("x")


# -- links and what is no file ------------------------------------------------------------------


@refused("1/back: it leads back to", "a loop")
def _loop_upwards(folder: Path) -> None:
    (write_python_model(folder) / "1" / "back").symlink_to("..")


@refused("1/a: it is a link to b: a loop of links")
def _loop_of_links(folder: Path) -> None:
    (write_python_model(folder) / "1" / "a").symlink_to("b")
    (folder / "1" / "b").symlink_to("a")


@refused("/a: ", "symbolic links")
def _url_in_a_loop(folder: Path) -> object:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a"


@refused("1/data: it is a link to nowhere: which does not exist")
def _dangling(folder: Path) -> None:
    (write_python_model(folder) / "1" / "data").symlink_to("nowhere")


@refused("1/data: it is a link to /etc/hostname", "outside the model roots")
def _escaping(folder: Path) -> None:
    (write_python_model(folder) / "1" / "data").symlink_to("/etc/hostname")


@refused("outside the model roots")
def _url_outside(folder: Path) -> object:
    return "/etc"


@refused("/data: it is neither a file nor a folder")
def _pipe(folder: Path) -> None:
    os.mkfifo(write_python_model(folder) / "data")


@refused("pipe: it is neither a file nor a folder")
def _url_of_a_pipe(folder: Path) -> object:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@refused("outside the model roots")
def _device_behind_a_link(folder: Path) -> None:
    (write_python_model(folder) / "1" / "zero").symlink_to("/dev/zero")


@refused(r"1/\xff: it is a link to \xfe: which does not exist")
def _undecodable_dangling(folder: Path) -> None:
    write_python_model(folder)
    Path(os.fsdecode(os.fsencode(folder) + b"/1/\xff")).symlink_to(os.fsdecode(b"\xfe"))


@refused("1/größe 📦: it is a link to")
def _unicode_dangling(folder: Path) -> None:
    (write_python_model(folder) / "1" / "größe 📦").symlink_to("nirgends")


@refused("File name too long")
def _too_deep(folder: Path) -> None:
    """Deeper than a path can say."""
    write_python_model(folder)
    where = os.open(folder, os.O_RDONLY)
    for _ in range(45):
        os.mkdir("d" * 100, dir_fd=where)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = below
    os.close(where)


@refused("is outside the model roots")
def _within_the_repository(folder: Path) -> object:
    return "REPOSITORY/good"


# -- several models -----------------------------------------------------------------------------


@refused("any of 'one', 'two' may be meant")
def _two_entries(folder: Path) -> None:
    write_adding(folder / "one", 1)
    write_adding(folder / "two", 2)


@refused("'three' is not in the package", "'one', 'two'")
def _entry_not_there(folder: Path) -> object:
    _two_entries(folder)
    return {"entry": "three"}


@refused("form a circle", "'a' -> 'b' -> 'a'")
def _circle(folder: Path) -> None:
    write_ensemble(folder / "a", "b")
    write_ensemble(folder / "b", "a")


@refused("ensemble 'whole' has the step 'two', which is not in the package")
def _missing_step(folder: Path) -> None:
    write_adding(folder / "one", 1)
    write_ensemble(folder / "whole", "one", "two")


@refused("two/config.pbtxt", ":1:10: ")
def _broken_helper(folder: Path) -> None:
    write_calling(folder / "one", "two")
    write_adding(folder / "two", 1)
    (folder / "two" / "config.pbtxt").write_text("backend: 3")


@refused("net/config.pbtxt: parameter memory_bytes")
def _broken_size_in_a_sub_folder(folder: Path) -> None:
    size = 'parameters { key: "memory_bytes" value { string_value: "lots" } }'
    write_python_model(folder / "net", config=CONFIG + size)


@refused("the entry 'two' is not in the package", r"'\udcff'")
def _undecodable_model(folder: Path) -> object:
    _two_entries(folder)
    (folder / "two").rename(os.fsdecode(os.fsencode(folder) + b"/\xff"))
    return {"entry": "two"}


# -- the tests ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(shared_adapter: RunningAdapter, model_root: Path) -> Iterator[RunningAdapter]:
    """The shared adapter with one good model, which is to serve all the while."""
    client = shared_adapter.client()
    put(client, "good", write_adding(model_root / "zoo-good", 1))
    yield shared_adapter
    take_down(client, "good")
    client.close()


@pytest.fixture
def visitor(zoo: RunningAdapter) -> Iterator[Client]:
    client = zoo.client()
    yield client
    client.delete("/models/broken")  # also what should never have been loaded
    client.close()


@pytest.mark.parametrize("animal", ZOO, ids=str)
def test_broken_package_is_refused_without_trace(
    zoo: RunningAdapter, visitor: Client, package: Path, animal: Animal
) -> None:
    """Refuse it by the file and the reason."""
    given = animal.make(package)
    hints = given if isinstance(given, dict) else {}
    url = package if given is None or hints else given
    url = str(url).replace("REPOSITORY", str(zoo.repository))
    before = sorted(zoo.repository.rglob("*")), books(zoo)
    begun = time.monotonic()
    reply = load(visitor, "broken", url, **hints)
    seconds = time.monotonic() - begun

    assert reply.headers.get_content_type() == "application/json"
    assert reply.status == animal.status, reply.body
    text = reply.json()["error"]
    assert [words for words in animal.said if words not in text] == [], text
    assert seconds < GENEROUS_SECONDS
    assert (sorted(zoo.repository.rglob("*")), books(zoo)) == before
    assert names_in_triton(zoo) == {"good"}
    assert ask(visitor, "good", 1) == [2]


def test_ensemble_cannot_use_another_packages_model(
    zoo: RunningAdapter, visitor: Client, package: Path
) -> None:
    """Its unload would take that one down with it."""
    reply = load(visitor, "broken", write_ensemble(package, "good"))
    assert visitor.delete("/models/broken").status == (404 if reply.status == 400 else 200)
    assert ask(visitor, "good", 1) == [2]
    assert reply.status == 400


def test_what_only_looks_odd_is_served(zoo: RunningAdapter, visitor: Client, package: Path) -> None:
    """5,000 files, names of any bytes, a config that has another name, an unknown field."""
    write_adding(package, 1)
    (package / "config.pbtxt").write_text(f'name: "other"\n{CONFIG}')
    assets = package / "1" / "assets"
    assets.mkdir()
    for number in range(5000):
        (assets / f"{number}").touch()
    for odd in (b"\xff\xfe", "größe 📦".encode(), b"a\nb", b"$(x) 'y' \"z\""):
        Path(os.fsdecode(os.fsencode(package) + b"/1/" + odd)).write_text("x")
        Path(os.fsdecode(os.fsencode(package) + b"/" + odd)).write_text("x")
    put(visitor, "odd", package)
    assert ask(visitor, "odd", 1) == [2]
    take_down(visitor, "odd")
    assert names_in_triton(zoo) == {"good"}
