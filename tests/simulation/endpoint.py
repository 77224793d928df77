"""The endpoint's side of the world: a store, its disk cache, and residency of each adapter."""

import math
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

from adapter.packages.unpack import Limits
from adapter.store.cache import ArtifactCache
from tests.simulation.cache import Room, SimFolder, files_at, labels_of
from tests.simulation.catalog import Catalog, Terms
from tests.simulation.control import Control
from tests.simulation.models import Spec, Violated
from tests.simulation.residents import Residents
from tests.simulation.store import CONFIG, SimStore

_MEMORY = "/dev/shm"
_MOST_ROOM_SECONDS = 10.0  # for which a fetch waits for room on disk


class Endpoint:
    """Holds the store, and what the adapter that runs now has of it."""

    def __init__(self, world: object, catalog: Catalog) -> None:
        self._world = world
        self.catalog = catalog
        self.root = Path(mkdtemp(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
        self.store = SimStore(
            catalog.versions, world.draws, world.take_fault, is_exact=catalog.is_exact
        )
        self.room = Room(catalog.disk_bytes)
        self.items = {item.spec.url: item for items in catalog.versions.values() for item in items}
        self.known: dict[str, Spec] = {}  # by place: its files, also those that are gone
        self.oracle = Residents(world, self)
        self.terms: Terms | None = None
        self.control: Control | None = None

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    # -- one adapter ------------------------------------------------------------------------

    def new_cache(self, terms: Terms) -> ArtifactCache:
        """Return the disk cache of the next adapter. To be called in its context."""
        self.terms = terms
        self._folder = SimFolder(self.root / "cache", self.room, self._world.take_fault)
        self._folder.kept = self._world.judged(self._kept)
        self.cache = ArtifactCache(
            {"": self.store},
            self._folder,
            limit_bytes=terms.cache_limit,
            concurrency=terms.fetch_concurrency,
            limits=Limits(),
            room_seconds=min(_MOST_ROOM_SECONDS, terms.model_wait_seconds / 2),
            on_evicted=lambda _: None,
        )
        return self.cache

    def new_adapter(self, control: Control) -> None:
        self.control = control
        self.oracle.new_adapter()

    async def killed(self) -> None:
        """Close what the system closes for a process that is gone, in its context."""
        self._folder.close()
        await self.cache.close()

    # -- what lies on the disk --------------------------------------------------------------

    def spec_at(self, place: str) -> Spec | None:
        """Return what the files of a cached package are; None if they are not there any more.

        Raises Violated for what the store never had at one time.
        """
        said = labels_of(files_at(Path(place)))
        if not said:
            return None
        spec = self.known[place] = self.spec_of(said, place)
        return spec

    def read_by_triton(self, name: str, place: str) -> Spec | None:
        """Return what Triton finds at the place when it loads the model of this name."""
        held = self._world.triton.held(name)
        is_unloading = held is not None and held.state == "UNLOADING"  # which may do without files
        is_ours = self._world.control is self.control and not is_unloading
        spec = self.spec_at(place)
        if spec is None and is_ours:
            loading = {model.name for model in self._world.known_models("LOADING")}
            if name in loading:
                raise Violated("5 cache", f"the files of {name} have left the disk")
        return spec

    def _kept(self, package: Path) -> None:
        """A folder is kept only if the store had it once all of it was read."""
        said = labels_of(files_at(package))
        key = self.items[next(iter(said.values()))[0]].key
        self.spec_of(said, package.name, self.store.read_at[key] if CONFIG in said else 0.0)

    def spec_of(self, said: dict[str, tuple[str, int]], place: str, since: float = 0.0) -> Spec:
        """Return what the files are, which the store had together, at `since` or later."""
        urls = {part: url for part, (url, _) in said.items()}
        weights = next(url for part, url in urls.items() if part != CONFIG)
        item = self.items[weights]
        config = self.items[urls.get(CONFIG, weights)]
        if item.is_folder != (CONFIG in said) or config.key != item.key:
            raise Violated("1 right files", f"{place} has {said}")
        for part, (url, count) in said.items():
            if count != self.items[url].size_of(part):
                raise Violated("1 right files", f"{part} of {url} has {count} bytes")
        numbers = (config.spec.version, item.spec.version)[not item.is_folder :]
        history = self.store.history[item.key]
        ends = [at for at, _ in history[1:]] + [math.inf]
        if not any(
            had and had[-len(numbers) :] == numbers and end > since
            for (_, had), end in zip(history, ends, strict=True)
        ):
            said = f"the store had no {numbers} of {item.key} at {since:.0f} s or later"
            raise Violated("1 right files", said)
        return item.spec

    @property
    def artifacts(self) -> Path:
        return self.root / "cache" / "artifacts"

    @property
    def work(self) -> Path:
        return self.root / "cache" / "work"
