"""Only what our own Triton has unpacked is removed."""

import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapter.triton.server.cleanup import find_environment, note_environment, remove_environments
from tests.running import wait_until


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder as Triton makes it."""
    name = secrets.token_hex(3)  # tempfile takes eight letters where Triton takes six
    made = Path("/tmp", f"python_env_{name}")
    made.mkdir(0o700)
    (made / "0").mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@contextmanager
def stub_with(path: object) -> Iterator[int]:
    environ = {"LD_LIBRARY_PATH": str(path)}
    with subprocess.Popen(["/bin/sleep", "1000"], env=environ) as process:
        try:  # arguments and environment are there together, a moment after exec
            wait_until(Path(f"/proc/{process.pid}/cmdline").read_bytes, 10, "it has begun")
            yield process.pid
        finally:
            process.kill()


def test_stubs_folder_is_where_it_started(place):
    with stub_with(f"{place}/0/lib:/usr/lib") as pid:
        assert find_environment(pid, 0) == place
        assert find_environment(pid, time.time() + 60) is None, "it is older than this Triton"
        place.chmod(0o755)
        assert find_environment(pid, 0) is None, "Triton makes none of that mode"
    assert find_environment(pid, 0) is None


@pytest.mark.parametrize("form", ["{}/lib", "/usr/lib:{}/0/lib", "{}x/0/lib", "{}/0/lib2", "/tmp"])
def test_any_other_place_is_not_triton_s(place, form):
    with stub_with(form.format(place)) as pid:
        assert find_environment(pid, 0) is None


@pytest.mark.parametrize("is_link", [False, True])
def test_another_folder_of_the_same_name_stays(place, tmp_path, is_link):
    note_environment(notes := tmp_path / "notes", place)
    kept = place.rename(tmp_path / "kept")  # so that its inode is not used again
    if is_link:
        place.symlink_to(kept)
    else:
        place.mkdir(0o700)
    remove_environments(notes)
    assert place.exists()
    assert (kept / "0").exists()
    assert not notes.exists()
    if is_link:
        place.unlink()
