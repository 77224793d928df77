"""A store of models: slow, refusing, cut, wrong about lengths, and with ever other versions."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from adapter.errors import StoreDenied, StoreUnavailable
from adapter.settings.locations import StoreKind, StoreLocation
from adapter.store.ports import Changed, StoredFile
from tests.simulation.loop import EPOCH, Draws, turns
from tests.simulation.models import Spec

CONFIG, WEIGHTS = "config.pbtxt", "1/model.bin"
_CONFIG_BYTES = 200
_LATENCIES = (0.0, 0.0, 0.001, 0.05, 0.3)
_SLOW_SECONDS = (8.0, 40.0)
# faults of a request, by the store's method
STORE_FAULTS = {
    "stat": ("denied", "unavailable", "lacks", "slow"),
    "below": ("denied", "unavailable", "lacks", "slow"),
    "read": ("denied", "unavailable", "lacks", "slow", "cut", "truncated", "longer"),
    "check": ("unavailable",),
}


@dataclass(frozen=True, slots=True)
class Item:
    """One version of a model in the store. `size_bytes`: of its weights, which are a lone file
    unless it `is_folder`, with a config beside them.
    """

    spec: Spec
    size_bytes: int
    is_folder: bool

    @property
    def key(self) -> str:
        return self.spec.model_id

    def size_of(self, part: str) -> int:
        return _CONFIG_BYTES if part == CONFIG else self.size_bytes

    def content(self, part: str) -> bytes:
        said = f"{self.spec.url} {part} ".encode()
        return said + b"." * (self.size_of(part) - len(said))


def read_back(content: bytes) -> tuple[str, str]:
    """Return the URL of the spec and the part that the content is of."""
    url, part, _ = content.split(b" ", 2)
    return url.decode(), part.decode()


class SimStore:
    """Keeps models as the Store of adapter/store/ports.py does, and fails as stores do."""

    def __init__(
        self,
        versions: dict[str, tuple[Item, ...]],  # by key, also those of later
        draws: Draws,
        fault: Callable[[str, str], str | None],  # takes the one that is set for such an act
        *,
        is_exact: bool,  # a download that broke off may go on where it was
    ) -> None:
        self.location = StoreLocation(StoreKind.S3, "models")
        self.versions = versions
        # versions of config and weights that are in the store, by key
        self.has = dict.fromkeys(versions, (0, 0))
        # versions in the store by key, with the time of each change
        self.history: defaultdict[str, list[tuple[float, tuple[int, int] | None]]]
        self.history = defaultdict(list, {key: [(0.0, (0, 0))] for key in versions})
        self.read_at: dict[str, float] = {}  # time of the last read, by key
        self._draws = draws
        self._fault = fault
        self._is_exact = is_exact

    def put(self, key: str, *, config: int | None = None, weights: int | None = None) -> None:
        """Put other files in place; without a number those that there are stay."""
        known = self.has.get(key, (0, 0))
        numbers = known[0] if config is None else config, known[1] if weights is None else weights
        self.has[key] = numbers
        self.history[key].append((_now(), numbers))

    def lose(self, key: str) -> None:
        self.has.pop(key, None)
        self.history[key].append((_now(), None))

    # -- as the cache asks ------------------------------------------------------------------

    async def stat(self, path: str) -> StoredFile | None:
        if await self._act("stat", path) == "lacks":
            return None
        return self._files(path).get(path)

    async def list_below(self, path: str, limit: int) -> list[StoredFile]:
        if await self._act("below", path) == "lacks":
            return []
        return [file for key, file in self._files(path).items() if key != path][:limit]

    async def read(self, file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        fault = await self._act("read", file.path)
        found = self._files(file.path).get(file.path)
        if fault == "lacks" or found is None or found.etag != file.etag:
            raise Changed
        content = self._content(file.path)[offset:]
        random = self._draws.of("read", file.path)
        end = len(content) // 2 if fault in {"cut", "truncated"} else len(content)
        if fault == "longer":
            content, end = content + b"more", end + 4
        size = max(1, -(-end // random.choice((1, 1, 2, 3))))
        for begin in range(0, end, size):
            await self._pause(random)
            self.read_at[file.path.partition("/")[0]] = _now()
            yield content[begin : min(end, begin + size)]
        if fault == "cut":
            raise StoreUnavailable("the connection broke")

    async def check(self) -> None:
        await self._act("check", "")

    # -- inside -----------------------------------------------------------------------------

    async def _act(self, verb: str, path: str) -> str | None:
        key, random = path.partition("/")[0], self._draws.of("store", verb, path)
        await self._pause(random)
        fault = self._fault(verb, key)
        if fault == "slow":
            await asyncio.sleep(random.uniform(*_SLOW_SECONDS))
        if fault == "denied":
            raise StoreDenied("the store refuses access: 403 Forbidden")
        if fault == "unavailable":
            raise StoreUnavailable("the store answered 500 Internal Server Error")
        return fault

    async def _pause(self, random: object) -> None:
        await turns(random)
        if (seconds := random.choice(_LATENCIES)) > 0.0:
            await asyncio.sleep(seconds)

    def _files(self, path: str) -> dict[str, StoredFile]:
        """Return all objects of the key that the path is of, or is below."""
        key = path.partition("/")[0]
        if (numbers := self.has.get(key)) is None:
            return {}
        config, weights = (self.versions[key][number] for number in numbers)
        if not weights.is_folder:
            return {key: self._file(key, weights, WEIGHTS)}
        parts = ((CONFIG, config), (WEIGHTS, weights))
        return {f"{key}/{part}": self._file(f"{key}/{part}", item, part) for part, item in parts}

    def _file(self, path: str, item: Item, part: str) -> StoredFile:
        etag = f'"{item.key}-{part}-{item.spec.version}"'
        modified = EPOCH + item.spec.version
        return StoredFile(path, item.size_of(part), etag, modified, is_exact=self._is_exact)

    def _content(self, path: str) -> bytes:
        key, _, below = path.partition("/")
        part = below or WEIGHTS
        return self.versions[key][self.has[key][part == WEIGHTS]].content(part)


def _now() -> float:
    return asyncio.get_running_loop().time()
