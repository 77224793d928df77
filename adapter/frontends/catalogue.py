"""Lists the packages of the stores for frontends: page by page, and all where there are few."""

from collections.abc import Collection
from typing import Protocol

from adapter.core.artifacts import ArtifactKey, PackagePage, StorePackage
from adapter.errors import InvalidRequest

MAX_LISTED = 1000  # packages in one answer
# A page may be empty although more follow: a store with many other keys ends a list after these.
_MAX_PAGES = 10


class Catalogue(Protocol):
    """Lists the packages of the stores."""

    @property
    def stores(self) -> Collection[str]:
        """Return the names of the stores."""

    async def list_page(self, store: str, pattern: str, after: str, limit: int) -> PackagePage:
        """Return at most `limit` packages of a store in the order of their keys, behind `after`,
        and beside them those that are loaded though the store has them no longer.

        There may be fewer although more follow: one call reads a limited number of keys. `pattern`
        is a glob of a whole name if it has `*`, `?` or `[`, and else a text within it. A store
        that cannot be listed has the packages that are on disk.
        """

    async def describe(self, key: ArtifactKey) -> StorePackage | None:
        """Return the package of a key, or of the archive of that name; None if there is none."""


async def list_all(catalogue: Catalogue) -> list[StorePackage]:
    """Return the packages of all stores. Raises InvalidRequest if there are more than MAX_LISTED:
    a list that is cut looks like a whole one.
    """
    packages: list[StorePackage] = []
    for store in sorted(catalogue.stores):
        after: str | None = ""
        for _ in range(_MAX_PAGES):
            if after is None:
                break
            page = await catalogue.list_page(store, "", after, MAX_LISTED + 1 - len(packages))
            packages += page.packages
            after = page.after
            if len(packages) > MAX_LISTED:
                break
        if after is not None or len(packages) > MAX_LISTED:
            raise InvalidRequest(
                f"the stores have too many models for an index, which has {MAX_LISTED} at most; "
                "`triton-adapter list` and /store/models of the listener admin have pages"
            )
    return packages
