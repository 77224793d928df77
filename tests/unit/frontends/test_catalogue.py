"""A list of all packages of the stores is whole, or refused."""

import pytest

from adapter.core.artifacts import ArtifactKey, PackagePage, StorePackage
from adapter.errors import InvalidRequest
from adapter.frontends.catalogue import MAX_LISTED, list_all


class Numbered:
    """A Catalogue whose only store has so many packages, a few a page."""

    def __init__(self, count: int, page: int = 400) -> None:
        self.stores = [""]
        self.asked = 0
        self._count = count
        self._page = page

    async def list_page(self, store: str, _: str, after: str, limit: int) -> PackagePage:
        self.asked += 1
        start = int(after or 0)
        end = min(self._count, start + min(self._page, limit))
        keys = [ArtifactKey(store, f"m{number}") for number in range(start, end)]
        packages = [StorePackage(key, None, None, None, None) for key in keys]
        return PackagePage(packages, str(end) if end < self._count or not self._page else None)

    async def describe(self, _: ArtifactKey) -> StorePackage | None:
        return None


@pytest.mark.parametrize("count", [0, 1, MAX_LISTED])
async def test_few_packages_are_all_listed(count: int) -> None:
    packages = await list_all(Numbered(count))

    assert [package.key.path for package in packages] == [f"m{at}" for at in range(count)]


async def test_too_many_packages_are_refused_early() -> None:
    catalogue = Numbered(100_000)
    with pytest.raises(InvalidRequest, match="1000 at most"):
        await list_all(catalogue)

    assert catalogue.asked == 3


async def test_store_of_other_keys_is_refused_early() -> None:
    """Such a store has pages without any package, and no end."""
    catalogue = Numbered(100_000, page=0)
    with pytest.raises(InvalidRequest, match="1000 at most"):
        await list_all(catalogue)

    assert catalogue.asked == 10
