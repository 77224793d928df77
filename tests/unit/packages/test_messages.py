"""How faults of packages are worded."""

import os
from pathlib import Path

from adapter.packages import messages
from adapter.packages.messages import (
    cut,
    did_you_mean,
    invalid_model,
    listed,
    quoted_list,
    shown,
)
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


def test_list_has_ten_items_and_their_rest():
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert listed(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert quoted_list(["a", "b"], " -> ") == "'a' -> 'b'"
    assert listed([]) == "nothing"


def test_a_long_text_is_cut():
    assert cut("a" * 100) == "a" * 100
    assert cut("a" * 101) == "a" * 100 + "..."


def test_known_name_is_proposed_for_each_misspelt_one():
    assert did_you_mean(["pythom", "x"], ["python", "onnx"]) == "; did you mean python?"
    assert not did_you_mean(["x"], ["python"])


def test_remedy_comes_before_the_fault():
    error = invalid_model(Path("m/1"), "it is empty", remedy="add a model.py")
    assert str(error) == "m/1: add a model.py; it is empty"
    assert str(invalid_model("a\udcff", "it is empty")) == r"a\xff: it is empty"


def test_every_invalid_model_is_made_by_messages():
    folder = Path(messages.__file__).parent
    files = {file.name for file in folder.glob("*.py") if "InvalidModel(" in file.read_text()}
    assert files == {"messages.py"}
