"""Folders to unpack into, and what a refusal leaves."""

import pytest

from adapter.errors import InvalidModel
from adapter.packages.archive import unpack
from tests.unit.packages.archives.making import LIMITS, write


@pytest.fixture
def box(tmp_path):
    """The target is in a folder of its own; `secret` is beside it."""
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "secret").write_bytes(b"secret")
    return tmp_path / "box"


@pytest.fixture
def target(box):
    return box / "target"


@pytest.fixture
def refused(tmp_path, box, target):
    """Unpack what must be refused; the text. Nothing is left, nothing else is touched."""

    def attempt(data, name="m.tar", limits=LIMITS, error=InvalidModel):
        archive = write(tmp_path / name, data)
        with pytest.raises(error) as caught:
            unpack(archive, target, limits)
        assert [path.name for path in box.iterdir()] == ["secret"]
        assert (box / "secret").read_bytes() == b"secret"
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["box", name])
        assert str(archive) in str(caught.value)
        return str(caught.value)

    return attempt
