"""A folder of models, for adapters that differ in whom they let in."""

import pytest

from tests.trees import write_python_model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The model `echo` answers with its input."""
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "echo")
    return root
