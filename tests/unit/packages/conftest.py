"""Where packages are."""

import pytest


@pytest.fixture
def root(tmp_path):
    """The only model root."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder
