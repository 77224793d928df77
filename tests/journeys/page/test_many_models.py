"""The page before 1000 models: what it asks for and what it shows is bounded."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.admin import admin_of, adopt
from tests.fakes.house import House
from tests.journeys.page.browser import PHONE, Browser

pytestmark = pytest.mark.slow

MIB = 2**20
MODELS = 1000


async def _serve(started: "asyncio.Future[str]", end: asyncio.Event) -> None:
    house = await House(limit=MODELS * 1000 * MIB).open()
    for number in range(MODELS):
        adopt(house, f"m{number:03}", (number + 1) * MIB)
    async with admin_of(house) as admin:
        started.set_result(f"127.0.0.1:{admin.port}")
        await end.wait()
    await house.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the admin listener of a control plane with doubles behind it."""
    loop = asyncio.new_event_loop()
    started, end = loop.create_future(), asyncio.Event()
    found: list[str] = []
    known = threading.Event()

    def tell(future: "asyncio.Future[str]") -> None:
        found.append(future.result())
        known.set()

    started.add_done_callback(tell)
    serving = threading.Thread(target=loop.run_until_complete, args=(_serve(started, end),))
    serving.start()
    assert known.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(end.set)
    serving.join(20)
    loop.close()


def test_a_thousand_models_are_a_page_of_bounded_size(address: str, browser: Browser) -> None:
    browser.open(address)
    browser.until(lambda: len(browser.rows()) == 100, "a hundred rows")
    assert next(iter(browser.rows())) == "m999"
    assert "1,000 models" in browser.text("#counts")
    assert "100 of 1,000 shown" in browser.text("#counts")
    assert browser.run("return document.getElementsByTagName('*').length") < 3000
    asked = """
      return performance.getEntriesByType('resource').filter((one) => one.name.includes('state'))
        .map((one) => one.decodedBodySize)"""
    sizes = browser.run(asked)
    assert sizes
    assert max(sizes) < 64 * 1024
    assert browser.log() == []


def test_rows_that_stay_are_the_same_elements_from_answer_to_answer(
    address: str, browser: Browser
) -> None:
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


def test_any_of_them_is_found_by_its_name(address: str, browser: Browser) -> None:
    browser.open(address, PHONE)
    browser.run(
        "const field = document.getElementById('filter'); field.value = 'm007';"
        "field.dispatchEvent(new Event('input'))"
    )
    browser.until(lambda: [*browser.rows()] == ["m007"], "the one that matches")
    assert "1 match the filter" in browser.text("#counts")


def test_the_table_is_sorted_by_what_is_clicked(address: str, browser: Browser) -> None:
    browser.open(address)
    browser.run("document.querySelector('[data-sort=name]').click()")
    browser.until(lambda: next(iter(browser.rows()), "") == "m000", "by name")
    assert browser.run("return document.querySelector('th[aria-sort]').innerText") == "Model"
    head = "return document.querySelector('th[aria-sort]').ariaSort"
    assert browser.run(head) == "ascending"
    browser.run("document.querySelector('[data-sort=name]').click()")
    browser.until(lambda: next(iter(browser.rows()), "") == "m999", "the reverse")
    assert browser.run(head) == "descending"


def test_a_phone_has_fewer_rows_and_a_list_to_sort_by(address: str, browser: Browser) -> None:
    browser.open(address, PHONE)
    browser.until(lambda: len(browser.rows()) == 20, "twenty rows")
    browser.run(
        "const list = document.getElementById('sorts'); list.value = 'name';"
        "list.dispatchEvent(new Event('change'))"
    )
    browser.until(lambda: next(iter(browser.rows()), "") == "m000", "by name")
    assert browser.run("return document.getElementById('sorts').offsetHeight") > 0


def test_models_too_small_to_be_seen_are_one_piece_and_have_no_colour(
    address: str, browser: Browser
) -> None:
    browser.open(address)
    browser.until(lambda: len(browser.rows()) == 100, "a hundred rows")
    widths = """
      return [...document.querySelectorAll('.bar > div')].map((one) => one.offsetWidth)"""
    assert min(browser.run(widths)) >= 4
    assert "m999" not in browser.text(".legend")
    assert "models" in browser.text(".legend")
    assert browser.run("return document.querySelectorAll('tr .swatch:not([hidden])').length") == 0
