"""An earlier adapter is replaced by this one: what it had loaded, fetched and learned stays."""

import io
import json
import subprocess
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapter.packages.sizes_file import FILE_NAME
from tests.journeys.endpoint.folder_store import Caller, Store
from tests.journeys.memory.models import MIB, check_agreement, write_eater
from tests.ports import free_ports
from tests.processes import beside
from tests.running import (
    EMBEDDED,
    Client,
    RunningAdapter,
    embedded_adapter,
    running_adapter,
    wait_until,
)

pytestmark = pytest.mark.triton

_PREVIOUS = "dccc07a"
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def previous(tmp_path_factory) -> dict[str, str]:
    """Return the environment in which `python -m adapter` is the code of the previous commit."""
    command = ("git", "archive", _PREVIOUS, "adapter", "bench")
    packed = subprocess.run(command, cwd=_ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"no history of this clone has {_PREVIOUS}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder)}


@contextmanager
def _asking(address: str, name: str) -> Iterator[Counter[str]]:
    """Invoke the model without a pause until the end of the block; yield what came back."""
    answers: Counter[str] = Counter()
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                with Client(address) as client:
                    while not is_over.is_set():
                        reply = client.invoke(name, 2.5)
                        right = reply.status == 200 and reply.data == [2.5]
                        answers["right" if right else f"{reply.status} {reply.body!r}"] += 1
                        if reply.status != 200:
                            break
            except OSError:
                answers["no connection"] += 1
                is_over.wait(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


def test_external_tritons_models_outlive_the_adapter(previous, tmp_path):
    package = write_eater(tmp_path / "m", 16)
    [port] = free_ports(1)
    flags = (f"--model-roots={tmp_path}", "--memory-limit=1GiB", f"--http=127.0.0.1:{port}")
    with (
        embedded_adapter() as triton,
        beside(triton, *flags, environ=previous) as old,
        old.client() as client,
    ):
        client.load_model("m", package)
        with _asking(f"127.0.0.1:{port}", "m") as answers:
            wait_until(lambda: answers["right"] > 10, 30, "the old one answers")
            known = _sizes(old)
            old.stop()
            with beside(triton, *flags) as new:
                before = answers["right"]
                wait_until(lambda: answers["right"] > before + 10, 30, "the new one answers")
                assert [line["model_id"] for line in new.events("model.adopted")] == ["m"]
                assert _sizes(new) == known
                check_agreement(new)
    odd = {each for each in answers if each not in {"right", "no connection"}}
    assert all(each.startswith("503 ") for each in odd), answers


def _sizes(adapter: RunningAdapter) -> dict[str, object]:
    return {each["model_id"]: each["bytes"] for each in adapter.state()["models"]}


def _kept_sizes(repository: Path) -> dict[str, Any]:
    return json.loads((repository / FILE_NAME).read_text())


def test_store_sizes_survive_an_upgrade(previous, tmp_path):
    """The earlier cache does not say which version the store named last: it is fetched again."""
    store, names = Store(tmp_path / "store"), ("a.tar.gz", "b.tar.gz")
    for number, name in enumerate(names, start=1):
        store.put(name, number, weights=bytes(MIB))
    flags = (f"--model-store={store.path}", f"--cache-dir={tmp_path / 'cache'}", "--on-demand")
    repository = tmp_path / "repository"
    flags = (*EMBEDDED, *flags, f"--repository={repository}")
    with (
        running_adapter(*flags, environ=previous) as old,
        closing(Caller(old)) as caller,
    ):
        assert [caller.invoke(name) for name in names] == [(1, "miss"), (2, "miss")]
    kept = _kept_sizes(repository)

    with running_adapter(*flags) as new, closing(Caller(new)) as caller:
        assert [caller.invoke(name) for name in names] == [(1, "miss"), (2, "miss")]

        def are_known() -> bool:
            return kept["models"].keys() <= _kept_sizes(repository)["models"].keys()

        wait_until(are_known, 30, "the sizes of both are known")
        check_agreement(new)
