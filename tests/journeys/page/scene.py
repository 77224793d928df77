"""What the page is shown: an adapter with a Triton of its own, a store that is slow, and models."""

import asyncio
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.constants import STORE
from tests.fakes.loop_thread import Run, loop_in_thread
from tests.journeys.memory.models import MIB, write_eater
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.store.web import Answer, Page, WebServer, web_server, well
from tests.trees import infer_body

LIMIT = 1024 * MIB
ARRIVES = "image-caption.tar.gz"
LEAVES = (
    "translate-en-de.tar.gz"  # is loaded when it is called, and evicted for what is loaded later
)
TOO_MUCH = "video-tagger"
# what each takes, beside the 40 MiB or so of its process
SIZES = {"support-chat": 380, "product-search": 160, "fraud-score": 60}


class SlowStore:
    """A web server of models by name, which sends a part of one, and the rest when it may."""

    def __init__(self, server: WebServer, run: Run) -> None:
        self.url = server.url
        self._server = server
        self._run = run
        self._may_go_on = asyncio.Event()

    def hold(self, share: float) -> None:
        """Let the next fetch have this share, and wait."""

        async def part(answer: Answer) -> object:
            response = await answer.begin()
            count = int(len(answer.rest) * share)
            await response.write(answer.rest[:count])
            await self._may_go_on.wait()
            await response.write(answer.rest[count:])
            return response

        self._may_go_on.clear()
        self._server.script[:] = [part, *[well] * 5]

    def go_on(self) -> None:
        self._run(self._let_go_on())

    async def _let_go_on(self) -> None:
        self._may_go_on.set()


@contextmanager
def slow_store(bodies: dict[str, bytes]) -> Iterator[SlowStore]:
    with loop_in_thread() as run:
        undo = AsyncExitStack()
        server = run(undo.enter_async_context(web_server()))
        server.pages |= {f"/{name}": Page(body) for name, body in bodies.items()}
        store = SlowStore(server, run)
        try:
            yield store
        finally:
            store.go_on()
            run(undo.aclose())


@dataclass
class Scene:
    adapter: RunningAdapter
    folder: Path
    store: SlowStore
    _calls: list[threading.Thread] = field(default_factory=list)

    def load(self, name: str) -> int:
        with self.adapter.client() as client:
            return client.load(name, self.folder / name).status

    def unload(self, name: str) -> int:
        with self.adapter.client() as client:
            return client.unload(name).status

    def invoke(self, name: str, count: int = 1) -> None:
        with self.adapter.client() as client:
            for _ in range(count):
                assert client.invoke(name).status == 200

    def call_for_what_arrives(self) -> None:
        """Call for a model of the store, and wait for no answer."""
        self._calls.append(threading.Thread(target=self.call_for, args=(ARRIVES,)))
        self._calls[-1].start()

    def call_for(self, name: str) -> int:
        with self.adapter.client(timeout=600) as client:
            return client.post(f"/v2/models/{name}/infer", infer_body(1.0)).status

    def close(self) -> None:
        self.store.go_on()
        for each in self._calls:
            each.join(30)


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, ".")
    return packed.getvalue()


@contextmanager
def scene(root: Path) -> Iterator[Scene]:
    folder = root / "models"
    for name, mebibytes in SIZES.items():
        write_eater(folder / name, mebibytes, declares=f"{mebibytes + 40}MiB")
    write_eater(folder / TOO_MUCH, 1, declares="700MiB")
    arrives = write_eater(root / "arrives", 20, declares="60MiB")
    (arrives / "1" / "weights.bin").write_bytes(os.urandom(8 * MIB))
    leaves = write_eater(root / "leaves", 320, declares="360MiB")
    with slow_store({ARRIVES: _packed(arrives), LEAVES: _packed(leaves)}) as store:
        flags = (
            *(f"--model-roots={folder}", f"--memory-limit={LIMIT}", COMPLETE),
            *(f"--model-store={store.url}", f"--cache-dir={root / 'cache'}", "--on-demand"),
            "--cache-limit=64MiB",
            "--pin=support-*",
            # what the store holds back is looked at for as long as a browser takes
            "--model-wait-seconds=600",
        )
        with embedded_adapter(*flags, constants={STORE: 600}) as adapter:
            shown = Scene(adapter, folder, store)
            yield shown
            shown.close()
