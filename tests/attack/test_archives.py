"""The real command with many large archives at once: nobody else waits for them."""

import io
import os
import signal
import tarfile
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.asking import quoted
from tests.journeys.sagemaker.test_load_limit import suspended
from tests.processes import is_alive
from tests.running import COMPLETE, Client, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_THREADS = 4
_ARCHIVES = 6  # more than there are threads for them
_FILES = 10_000  # each is a call or two of the kernel's: time enough to stop who makes them


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("small", "other"):
        write_python_model(root / name)
    with tarfile.open(root / "large.tar", "w") as archive:
        for number in range(_FILES):
            entry = tarfile.TarInfo(f"1/{number}")
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
    return root


@pytest.mark.timeout(300)
def test_archives_hold_up_no_probe_refusal_or_unload(root: Path) -> None:
    with embedded_adapter(f"--model-roots={root}", COMPLETE) as adapter:
        client, admin = adapter.client(), Client(adapter.admin)
        with closing(client), closing(admin):
            assert client.load("small", root / "small").status == 200
            ended: list[str] = []

            def load(name: str) -> None:
                with closing(adapter.client(250)) as own:
                    own.load(name, root / "large.tar")
                ended.append(name)

            names = [f"large {number}" for number in range(_ARCHIVES)]
            threads = [threading.Thread(target=load, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            unpacking = suspended(adapter, _THREADS)
            wait_until(lambda: loading(admin) == _ARCHIVES, 60, "all are being loaded")
            assert client.load("none", root / "none").status == 404
            assert client.load("outside", "/etc").status == 400
            assert client.get("/ping").status == 200
            assert admin.get("/metrics").status == 200
            assert client.post("/models/small/invoke", infer_body(1.0)).status == 200
            assert client.delete("/models/small").status == 200
            assert ended == []
            for name in names:  # an unload ends a load
                assert client.delete(f"/models/{quoted(name)}").status in {200, 404}
            for thread in threads:
                thread.join()
            assert not any(map(is_alive, unpacking))


@pytest.mark.timeout(300)
def test_unpacking_process_inherits_no_descriptor(root: Path) -> None:
    """None is closed for it, one by one: that would take the interpreter lock for milliseconds."""
    with embedded_adapter(f"--model-roots={root}", COMPLETE) as adapter:
        client, admin = adapter.client(250), Client(adapter.admin)
        with closing(client), closing(admin):
            assert client.load("small", root / "small").status == 200
            assert client.post("/models/small/invoke", infer_body(1.0)).status == 200
            loading_ = threading.Thread(target=client.load, args=("large", root / "large.tar"))
            loading_.start()
            (pid,) = suspended(adapter)
            assert inheritable(adapter.process.pid) == {0, 1, 2}
            os.kill(pid, signal.SIGCONT)
            loading_.join()


def inheritable(pid: int) -> set[int]:
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            flags = int(path.read_text().split("flags:")[1].split()[0], 8)
            found |= set() if flags & os.O_CLOEXEC else {int(path.name)}
    return found


def loading(admin: Client) -> int:
    states = [model["state"] for model in admin.get("/debug/state").json()["models"]]
    return states.count("PREPARING")
