"""Small packages, and what an inspection finds in them."""

import os
from pathlib import Path

import pytest

from adapter.core.model import ModelSource
from adapter.errors import InvalidModel
from adapter.packages.inspect import inspect

PYTHON = 'backend: "python"\n'


def make(folder, config=PYTHON, files=("1/model.py",)):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_bytes(config if isinstance(config, bytes) else config.encode())
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
    return folder


def look(folder, root, **hints):
    return inspect(ModelSource(str(folder), **hints), Path(os.path.realpath(folder)), [str(root)])


def refusal(folder, root, **hints):
    with pytest.raises(InvalidModel) as caught:
        look(folder, root, **hints)
    text = str(caught.value)
    assert text.encode()
    return text
