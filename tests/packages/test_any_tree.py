"""Whatever lies in a package: it is staged or refused in words, and all of it goes again."""

import asyncio
import io
import os
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.errors import AdapterError
from adapter.packages.contents import MARKER
from adapter.packages.staging import Packages
from tests.packages.staged import ensemble, tree

ODD = os.fsdecode(b"\xff")
NAMES = st.sampled_from(
    [
        *("1", "2", "01", "9" * 20, "m", "one", "two", "whole", "variables", "my model", ODD, "ü"),
        *("config.pbtxt", "config.pbtxt", "_schema.json", "model.py", "model.onnx", "net.onnx"),
        *("saved_model.pb", "a.zip", "a.tar.gz", ".hidden", "__MACOSX", "__pycache__", MARKER),
        *(f"{MARKER}.new", ".unpacked", "x.py", "net.xml", "net.bin", "xgboost.json", "a\nb"),
    ]
)
SCHEMA = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 3]}]}'
SIZE = b'parameters { key: "memory_bytes" value { string_value: "1 GiB" } }'
TEXTS = st.sampled_from(
    [
        *(b"", b"x", b"\xff", b"{", b"{}", b'backend: "python"', b'backend: "python" # \xff'),
        *(ensemble(*steps).encode() for steps in ((), ("one",), ("one", "two"), ("whole",))),
        *(SCHEMA, SIZE, b'backend: "python" max_batch_size: 8', b'platform: "onnxruntime_onnx"'),
        *(
            b"CALLED = 'one'",
            b"CALLED = ['two', 'm', 'my model', '\\udcff']",
            b"PK\3\4",
            b"\x1f\x8b",
        ),
    ]
)
LINKS = st.sampled_from(
    [*(".", "..", "../..", "1", "one", "../one", "nowhere", "/etc/hostname", "/", "model.py"), ODD]
).map(Path)
ENTRIES = st.recursive(
    TEXTS | LINKS, lambda below: st.dictionaries(NAMES, below, max_size=4), max_leaves=12
)
TREES = st.dictionaries(NAMES, ENTRIES, max_size=5)
# what is close to a good package of several models
MODEL = st.fixed_dictionaries(
    {"config.pbtxt": TEXTS, "1": st.dictionaries(NAMES, TEXTS | LINKS, max_size=3)}
)
PACKAGES = TREES | st.dictionaries(NAMES, MODEL | ENTRIES, max_size=4)
HINTS = st.fixed_dictionaries(
    {},
    optional={
        "model_type": st.sampled_from(["python", "onnx", "tensorflow:1", "xgboost", "?", ""]),
        "entry": st.sampled_from(["one", "whole", "m", "", ODD]),
    },
)
STAGINGS = st.sampled_from(["symlink", "hardlink", "copy"])


def write(folder, entries):
    folder.mkdir()
    for name, entry in entries.items():
        path = folder / name
        if isinstance(entry, dict):
            write(path, entry)
        elif isinstance(entry, Path):
            path.symlink_to(entry)
        else:
            path.write_bytes(entry)


def tar_bytes(folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        packed.add(folder, ".")
    return buffer.getvalue()


def zip_bytes(folder):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and str(path.relative_to(folder)).isascii():
                packed.write(path, path.relative_to(folder))
    return buffer.getvalue()


async def stage_and_remove(packages, url, hints):
    """The same twice: what the first leaves must not disturb the second."""
    for _ in range(2):
        name, model_id = TritonName("m"), ModelId("m")
        try:
            package = await packages.prepare(name, model_id, ModelSource(str(url), **hints))
            placement = await packages.place(name, model_id, package)
            assert len(set(placement.names)) == len(package.parts)
            assert placement.load[-1] == "m"
        except AdapterError as error:
            str(error).encode()  # it can be sent
        await packages.remove(name)


def check(make_url, hints, staging):
    with tempfile.TemporaryDirectory(prefix="any-tree-") as place:
        root, repository = Path(place) / "models", Path(place) / "repository"
        repository.mkdir()
        root.mkdir()
        url = make_url(root)
        before = tree(root)
        packages = Packages(repository, [root], staging=staging)
        asyncio.run(stage_and_remove(packages, url, hints))
        assert tree(repository) == {}
        assert tree(root) == before


MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# each unpacks in two processes; more of their bytes: tests/unit/packages/archives/test_random.py
FEWER = settings(MANY, max_examples=25)


@MANY
@given(entries=PACKAGES, hints=HINTS, staging=STAGINGS)
@pytest.mark.slow
def test_any_folder_is_staged_or_refused(entries, hints, staging):
    def make_url(root):
        write(root / "p", entries)
        return root / "p"

    check(make_url, hints, staging)


@FEWER
@given(
    entries=PACKAGES,
    hints=HINTS,
    staging=STAGINGS,
    is_zip=st.booleans(),
    damage=st.none() | st.tuples(st.integers(0, 2000), st.integers(0, 255)),
)
@pytest.mark.slow
def test_any_archive_is_staged_or_refused(entries, hints, staging, is_zip, damage):
    def make_url(root):
        write(root / "p", entries)
        raw = bytearray((zip_bytes if is_zip else tar_bytes)(root / "p"))
        if damage is not None:
            raw[damage[0] % len(raw)] = damage[1]
        archive = root / ("m.zip" if is_zip else "m.tar.gz")
        archive.write_bytes(raw)
        return archive

    check(make_url, hints, staging)
