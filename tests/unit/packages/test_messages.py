"""How faults of packages are worded."""

import os
from pathlib import Path

from adapter.packages import messages
from adapter.packages.messages import listed, shown
from tests.cases import rows


@rows(
    ("path", "text"),
    [
        (["/models", "a"], "/models/a"),
        ([os.fsdecode(b"bad\x80.onnx")], "bad\\x80.onnx"),
        (["half \ud800"], "half \\ud800"),
    ],
)
def test_path_of_any_bytes_is_sendable_text(path, text):
    assert shown(*path) == text
    assert shown(*path).encode()


def test_an_empty_list_is_nothing():
    assert listed([]) == "nothing"


def test_every_invalid_model_is_made_by_messages():
    folder = Path(messages.__file__).parent
    files = {file.name for file in folder.glob("*.py") if "InvalidModel(" in file.read_text()}
    assert files == {"messages.py"}
