"""The file that outlives the process: what was learned about packages."""

import asyncio
import json
import logging
import resource

import pytest

from adapter.packages.sizes_file import FILE_NAME, LearnedFile

DATA = {"packages": {"k": {"GPU-1": 7}}, "urls": ["ü \ud800"]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / FILE_NAME


def events(caplog):
    return [record.getMessage() for record in caplog.records]


def test_missing_file_is_no_knowledge(path, caplog):
    assert LearnedFile(path).load() is None
    assert LearnedFile(path.parent / "absent" / "file").load() is None
    assert events(caplog) == []


@pytest.mark.parametrize(
    "junk",
    [b"", b'{"a": 1', b"\xff", b"\0" * 100, b"[" * 100_000, b"1" * 5000],
    ids=lambda junk: junk[:8],
)
async def test_invalid_json_is_reported_and_moved(junk, path, caplog):
    path.write_bytes(junk)
    assert LearnedFile(path).load() is None
    assert events(caplog) == ["memory.sizes_unreadable"]
    assert caplog.records[0].path == str(path)
    assert caplog.records[0].reason
    assert not path.exists()
    assert path.with_name(FILE_NAME + ".bad").read_bytes() == junk
    await LearnedFile(path).save(DATA)
    assert LearnedFile(path).load() == DATA


def test_unreadable_file_is_reported_and_left(path, caplog):
    path.mkdir()
    assert LearnedFile(path).load() is None
    assert events(caplog) == ["memory.sizes_unreadable"]
    assert caplog.records[0].reason == "Is a directory"
    assert path.is_dir()


def test_immovable_junk_is_no_error(path, caplog):
    path.write_text("{")
    path.with_name(FILE_NAME + ".bad").mkdir()
    assert LearnedFile(path).load() is None
    assert events(caplog) == ["memory.sizes_unreadable"]


async def test_refusing_disk_is_reported_once(tmp_path, caplog):
    folder = tmp_path / "absent"
    file = LearnedFile(folder / FILE_NAME)
    await file.save(DATA)
    await file.save(DATA)
    assert events(caplog) == ["memory.sizes_unwritable"]
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].reason == "No such file or directory"
    folder.mkdir()
    await file.save(DATA)
    assert file.load() == DATA
    folder.rename(tmp_path / "elsewhere")
    await file.save(DATA)
    assert events(caplog) == ["memory.sizes_unwritable"] * 2


async def test_full_disk_leaves_the_old_file(path, caplog):
    """A limit on file size stands in for the full disk."""
    file = LearnedFile(path)
    await file.save(DATA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        await file.save({"much": "x" * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert events(caplog) == ["memory.sizes_unwritable"]
    assert file.load() == DATA
    assert [one.name for one in path.parent.iterdir()] == [FILE_NAME]


async def test_save_replaces_the_file(path):
    """A process that is killed while it saves leaves the old file or the new one."""
    file = LearnedFile(path)
    await file.save(DATA)
    with path.open() as old:
        await file.save({"new": 1})
        assert json.load(old) == DATA


@pytest.mark.slow
async def test_concurrent_saves_leave_one_whole(path, caplog):
    file = LearnedFile(path)
    await asyncio.gather(*(file.save([number] * 50_000) for number in range(20)))
    assert events(caplog) == []
    found = file.load()
    assert len(found) == 50_000
    assert len(set(found)) == 1


async def test_sizes_without_json_keep_the_old_file(path):
    file = LearnedFile(path)
    await file.save(DATA)
    with pytest.raises(TypeError):
        await file.save({"a": object()})
    assert json.loads(path.read_bytes()) == DATA
