"""The page before 1000 models, and a store of 100,000: what it asks for and shows is bounded."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import pytest
from aiohttp.test_utils import TestClient

from adapter.core.artifacts import ArtifactKey, DiskUse, PackagePage, StorePackage
from adapter.core.model import ModelId
from adapter.core.record import ModelRecord
from tests.fakes.admin import admin_of, adopt
from tests.fakes.control import ControlOnFakes
from tests.fakes.loop_thread import loop_in_thread
from tests.journeys.page.browser import PHONE, Browser

pytestmark = pytest.mark.slow

MIB = 2**20
MODELS = 1000
STORED = 100_000


class ManyPackages:
    """A Catalogue of a store with many packages, which reads 20,000 keys for a page as a real one.

    The names are sorted: model-000000.tar.gz, model-000001.tar.gz ...
    """

    def __init__(self) -> None:
        self.stores: Collection[str] = [""]
        self._paths = [f"model-{number:06}.tar.gz" for number in range(STORED)]

    async def list_page(self, _: str, pattern: str, after: str, limit: int) -> PackagePage:
        start = bisect_right(self._paths, after)
        found: list[StorePackage] = []
        for path in self._paths[start : start + 20_000]:
            if len(found) == limit:
                return PackagePage(found, found[-1].key.path)
            if pattern in path:
                found.append(StorePackage(ArtifactKey("", path), 2**20, "etag", 1.7e9, None))
        end = start + 20_000
        return PackagePage(found, None if end >= STORED else self._paths[end - 1])

    async def describe(self, _: ArtifactKey) -> StorePackage | None:
        return None


class EmptyDisk:
    """A StoreState of a store from which nothing was fetched."""

    waiting = 0
    evictions: Mapping[str, int] = MappingProxyType({})

    def unused(self) -> tuple[int, int]:
        return 0, 0

    def disk(self) -> DiskUse:
        return DiskUse(0, 0, 0, 2**30, 2**30)

    def models(self) -> Sequence[ModelRecord]:
        return ()

    def is_pinned(self, _: ModelId) -> bool:
        return False


async def serve() -> tuple[ControlOnFakes, TestClient]:
    fakes = await ControlOnFakes(limit=MODELS * 1000 * MIB).open()
    for number in range(MODELS):
        adopt(fakes, f"m{number:03}", (number + 1) * MIB)
    fakes.control_state.stores = EmptyDisk()
    admin = admin_of(fakes, ManyPackages())
    await admin.start_server()
    return fakes, admin


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the admin listener of a control plane with doubles behind it."""
    with loop_in_thread() as run:
        fakes, admin = run(serve())
        yield f"127.0.0.1:{admin.port}"
        run(admin.close())
        run(fakes.close())


def test_thousand_models_are_a_bounded_page(address, browser):
    browser.open(address)
    browser.until(lambda: len(browser.rows()) == 100, "a hundred rows")
    assert next(iter(browser.rows())) == "m999"
    assert "1,000 models" in browser.text("#counts")
    assert "100 of 1,000 shown" in browser.text("#counts")
    assert browser.run("return document.getElementsByTagName('*').length") < 4000
    asked = """
      return performance.getEntriesByType('resource').filter((one) => one.name.includes('state'))
        .map((one) => one.decodedBodySize)"""
    sizes = browser.run(asked)
    assert sizes
    assert max(sizes) < 64 * 1024
    assert browser.log() == []


def test_staying_rows_keep_their_elements(address, browser):
    browser.open(address)
    browser.until(lambda: len(browser.rows()) == 100, "a hundred rows")
    browser.run("window.kept = [...document.querySelectorAll('#models tr')]")
    asked = "return performance.getEntriesByType('resource').length"
    before = browser.run(asked)
    browser.until(lambda: browser.run(asked) >= before + 2, "two more answers")
    same = (
        "return [...document.querySelectorAll('#models tr')].every((row, at) => row === kept[at])"
    )
    assert browser.run(same)


def test_any_of_them_is_found_by_its_name(address, browser):
    browser.open(address, PHONE)
    browser.run(
        "const field = document.getElementById('filter'); field.value = 'm007';"
        "field.dispatchEvent(new Event('input'))"
    )
    browser.until(lambda: [*browser.rows()] == ["m007"], "the one that matches")
    assert "1 match the filter" in browser.text("#counts")


def test_the_table_is_sorted_by_what_is_clicked(address, browser):
    browser.open(address)
    browser.run("document.querySelector('[data-sort=name]').click()")
    browser.until(lambda: next(iter(browser.rows()), "") == "m000", "by name")
    assert browser.run("return document.querySelector('th[aria-sort]').innerText") == "Model"
    head = "return document.querySelector('th[aria-sort]').ariaSort"
    assert browser.run(head) == "ascending"
    browser.run("document.querySelector('[data-sort=name]').click()")
    browser.until(lambda: next(iter(browser.rows()), "") == "m999", "the reverse")
    assert browser.run(head) == "descending"


def test_phone_has_fewer_columns_and_a_sort_list(address, browser):
    browser.open(address, PHONE)
    browser.until(lambda: len(browser.rows()) == 20, "twenty rows")
    browser.run(
        "const list = document.getElementById('sorts'); list.value = 'name';"
        "list.dispatchEvent(new Event('change'))"
    )
    browser.until(lambda: next(iter(browser.rows()), "") == "m000", "by name")
    assert browser.run("return document.getElementById('sorts').offsetHeight") > 0


def test_tiny_models_are_one_colourless_piece(address, browser):
    browser.open(address)
    browser.until(lambda: len(browser.rows()) == 100, "a hundred rows")
    widths = """
      return [...document.querySelectorAll('.bar > div')].map((one) => one.offsetWidth)"""
    assert min(browser.run(widths)) >= 4
    assert "m999" not in browser.text(".legend")
    assert "models" in browser.text(".legend")
    assert browser.run("return document.querySelectorAll('tr .swatch:not([hidden])').length") == 0


def shelf(browser: Browser) -> list[str]:
    """Return the names of the store's models that are shown."""
    script = "return [...document.querySelectorAll('#shelf .name')].map((one) => one.textContent)"
    return list(browser.run(script))


def press(browser: Browser, button: str) -> None:
    browser.run("document.getElementById(arguments[0]).click()", button)


def filter_store(browser: Browser, text: str) -> None:
    browser.run(
        "const field = document.getElementById('store-filter'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input'))",
        text,
    )


def test_large_store_is_shown_page_by_page(address, browser):
    browser.open(address)
    browser.until(lambda: len(shelf(browser)) == 25, "the first page")
    assert shelf(browser)[0] == "model-000000.tar.gz"
    assert "there are more" in browser.text("#store-counts")
    for start in (25, 50):
        press(browser, "store-next")
        name = f"model-{start:06}.tar.gz"
        browser.until(lambda name=name: shelf(browser)[0] == name, "the next page")
    press(browser, "store-back")
    browser.until(lambda: shelf(browser)[0] == "model-000025.tar.gz", "the page before")
    assert len(shelf(browser)) == 25
    assert browser.run("return document.getElementsByTagName('*').length") < 4000
    asked = """
      return performance.getEntriesByType('resource').filter((one) => one.name.includes('store/'))
        .map((one) => one.decodedBodySize)"""
    sizes = browser.run(asked)
    assert 4 <= len(sizes) <= 6
    assert max(sizes) < 64 * 1024


def test_filter_finds_last_model_of_large_store(address, browser):
    """It is behind five reads of the store, of which each has nothing but the last."""
    browser.open(address)
    browser.until(lambda: len(shelf(browser)) == 25, "the first page")
    filter_store(browser, "99999")
    browser.until(lambda: shelf(browser) == ["model-099999.tar.gz"], "the one that matches")
    filter_store(browser, "nobody")
    browser.until(lambda: not shelf(browser), "none matches")
    assert browser.text("#store-none") == "No model of the store matches “nobody”."
    assert browser.run("return document.getElementById('store-next').disabled")
