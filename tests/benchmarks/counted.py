"""Models by their number: the cache that the endpoint is measured against."""

import threading
from collections import OrderedDict
from collections.abc import Callable


class CountedLru:
    """Keeps at most `count` models loaded, whatever their sizes, as Ray Serve's multiplexing does.

    A model that is there is used at once. One that is not there waits for the only lock; whoever
    has it unloads the model that was used least recently, loads the other, and then lets go.
    """

    def __init__(
        self, count: int, load: Callable[[str], object], unload: Callable[[str], object]
    ) -> None:
        self._count = count
        self._load = load
        self._unload = unload
        self._models: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def models(self) -> list[str]:
        """The least recently used is the first."""
        return list(self._models)

    def use(self, name: str) -> bool:
        """Have the model loaded; True if it was there. What `load` raises is raised."""
        if self._touch(name):
            return True
        with self._lock:
            if name not in self._models:  # nobody has loaded it meanwhile
                if len(self._models) >= self._count:
                    oldest, _ = self._models.popitem(last=False)
                    self._unload(oldest)
                self._load(name)
                self._models[name] = None
        return False

    def _touch(self, name: str) -> bool:
        """Without the lock: each step is one for other threads as well."""
        try:
            self._models.move_to_end(name)
        except KeyError:
            return False
        return True
