"""The page of the admin listener in a real browser, before a real adapter, Triton and models."""

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.journeys.page.browser import PHONE, Browser
from tests.journeys.page.scene import ARRIVES, SIZES, TOO_MUCH, Scene, scene
from tests.processes import suspend, tritonserver
from tests.running import Client, embedded_adapter, unload_all
from tests.trees import write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.timeout(400)]

EVIL = "<img src=x onerror=alert(1)>"
SMALL = "fraud-score"


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("scene")) as found:
        yield found


@pytest.fixture
def page(opened, browser) -> Iterator[Browser]:
    """The page, before an adapter without models; the browser has nothing to complain of."""
    browser.open(opened.adapter.admin)
    yield browser
    assert browser.log() == []
    origin = f"http://{opened.adapter.admin}/"
    assert {url for url in browser.requests() if not url.startswith((origin, "data:"))} == set()
    unload_all(opened.adapter)


def test_loads_appear_with_size_and_unloads_vanish(opened, page):
    assert page.text("#none").startswith("No model is loaded. ")
    assert opened.load(SMALL) == 200

    def is_measured() -> bool:
        row = page.rows().get(SMALL, "")
        return "ready" in row and "measured" in row

    page.until(is_measured, "the model is ready, and measured")
    row = page.rows()[SMALL]
    assert f"{float(row.split()[2]):.1f} MiB measured" in row
    assert float(row.split()[2]) >= SIZES[SMALL]
    assert SMALL in page.text(".legend")
    assert page.run("return document.querySelector('.bar').ariaLabel").startswith("Host memory: ")
    assert opened.unload(SMALL) == 200
    page.until(lambda: not page.rows(), "the model is gone")
    page.until(lambda: f"unloaded {SMALL} in" in page.events()[0], "and that is told")
    unloaded, loaded = page.events()[:2]
    assert f"unloaded {SMALL} in" in unloaded
    assert "MiB were freed" in unloaded
    assert f"loaded {SMALL} in" in loaded


def test_507_is_shown_with_figures_and_announced(opened, page):
    assert opened.load("support-chat") == 200
    page.until(lambda: "support-chat" in page.rows(), "the model is there")
    assert opened.load(TOO_MUCH) == 507
    page.until(lambda: TOO_MUCH in page.text("#last"), "the refusal is shown")
    said = page.text("#last")
    assert said.startswith("Last refusal")
    assert "507 InsufficientMemory" in said
    assert f"{TOO_MUCH} was not loaded: it needs 700.0 MiB, and only " in said
    assert "MiB of 1.0 GiB host memory are free." in said
    live = "const one = document.querySelector('#told'); return [one.ariaLive, one.textContent]"
    politeness, told = page.run(live)
    assert politeness == "polite"
    assert told.startswith(f"{TOO_MUCH} was not loaded: it needs 700.0 MiB")


def test_callers_mistake_is_told_below_lack_of_memory(opened, page):
    assert opened.load("product-search") == 200
    assert opened.load("support-chat") == 200
    assert opened.load(TOO_MUCH) == 507
    assert opened.load("no-such-folder") == 404
    page.until(lambda: "no-such-folder" in page.text("#mistake"), "the mistake is shown")
    assert page.text("#mistake").startswith("Last mistake of a caller")
    assert f"{TOO_MUCH} was not loaded" in page.text("#last")
    tones = "return [...document.querySelectorAll('#events .pill')].map((one) => one.className)"
    assert page.run(tones)[:2] == ["pill wait", "pill bad"]


def test_failed_load_is_told_until_mended(opened, page):
    write_python_model(opened.folder / "broken", initialize="raise ValueError('no weights')")
    assert opened.load("broken") == 400
    page.until(lambda: "broken" in page.text("#last"), "the failure is shown")
    assert "Last failure" in page.text("#last")
    assert "no weights" in page.text("#last")
    assert "broken" in page.events()[0]
    write_python_model(opened.folder / "broken")
    assert opened.load("broken") == 200
    page.until(lambda: "broken" not in page.text("#last"), "that is mended")


def test_requests_show_as_a_rate_and_latencies(opened, page):
    opened.load(SMALL)

    def is_shown() -> bool:
        opened.invoke(SMALL, 3)
        cells = page.run(
            "return [...document.querySelectorAll('#models td')].map((one) => one.innerText)"
        )
        if not cells:
            return False
        rate, p50, p99 = cells[4:7]
        is_rate = rate.replace(".", "").isdigit() and float(rate) > 0
        return is_rate and p50.endswith("s") and p99.endswith("s")

    page.until(is_shown, "a rate, p50 and p99")
    assert "requests/s" in page.text("#counts")


def test_fetch_shows_progress_then_the_model(opened, page):
    opened.store.hold(0.6)
    opened.call_for_what_arrives()
    page.until(lambda: "fetching" in page.rows().get(ARRIVES, ""), "the fetch is shown")
    shown = """
      const one = document.querySelector('#models progress');
      return [one.value, one.closest('tr').innerText]"""
    page.until(lambda: page.run(shown)[0], "its progress")
    percent, said = page.run(shown)
    assert 0 < percent <= 60
    assert f"fetching {percent:g} % of 8.0 MiB, 1 call waiting" in " ".join(said.split())
    opened.store.go_on()
    page.until(lambda: "ready" in page.rows().get(ARRIVES, ""), "the model is there")
    (fetched,) = [each for each in page.events() if f"fetched {ARRIVES}" in each]
    assert re.search(r"in [0-9.]+ s from its store; [0-9.]+ MiB on disk", fetched)


def test_the_disk_cache_has_a_bar(opened, page):
    assert opened.call_for(ARRIVES) == 200
    page.until(lambda: "1 loaded model" in page.text("#disk"), "it is on disk, and loaded")
    said = " ".join(page.text("#disk .device-head").split())
    assert re.fullmatch(r"Disk cache 1 model, [0-9.]+ MiB, of [0-9.]+ .iB [0-9.]+ .iB free", said)
    label = page.run("return document.querySelector('#disk .bar').ariaLabel")
    assert re.fullmatch(r"Disk cache: 1 loaded model [0-9.]+ MiB, free [0-9.]+ .iB", label)
    assert opened.unload(ARRIVES) == 200
    page.until(lambda: "1 model only on disk" in page.text("#disk"), "it is only on disk")


def test_missing_key_is_shown(opened, page):
    with opened.adapter.client() as client:
        assert client.call_endpoint("mistyped/model.tar.gz").status == 400
    page.until(lambda: "mistyped/model.tar.gz" in page.text("#mistake"), "it is told")
    assert "was not fetched" in page.text("#mistake")


def test_killed_triton_and_its_return_are_shown(opened, page):
    assert opened.load(SMALL) == 200
    assert opened.call_for(ARRIVES) == 200
    os.kill(tritonserver(opened.adapter), signal.SIGKILL)
    of_triton = {"Triton down", "Models lost"}
    page.until(lambda: any("Triton down" in each for each in page.events()), "Triton is down")
    page.until(lambda: any("Triton is back" in each for each in page.events()), "Triton is back")
    page.until(lambda: page.text("#last-title") not in of_triton, "that is mended")
    page.until(lambda: page.text("#state") == "ready", "the adapter is ready")
    (down,) = [each for each in page.events() if "Triton down" in each]
    assert "SIGKILL" in down
    page.until(lambda: any("Models lost" in each for each in page.events()), "what was lost")
    (lost,) = [each for each in page.events() if "Models lost" in each]
    assert f"loaded again by the adapter: {SMALL};" in lost
    assert f"loaded again by the next call: {ARRIVES}." in lost
    inside = """
      return [...document.querySelectorAll('#events li')].every((one) =>
        one.children[1].getBoundingClientRect().right
          < one.children[2].getBoundingClientRect().left)"""
    assert page.run(inside)


def test_tritons_exit_reason_replaces_its_silence(opened, page):
    def downs() -> list[str]:
        return [each for each in page.events() if "Triton down" in each]

    before = len(downs())
    suspend(pid := tritonserver(opened.adapter))
    page.until(lambda: len(downs()) > before, "Triton is down")
    assert "does not answer" in downs()[0]
    page.until(lambda: page.text("#last-title") == "Triton down", "that is what is wrong")
    os.kill(pid, signal.SIGKILL)
    page.until(lambda: "SIGKILL" in downs()[0], "why it is down")
    assert len(downs()) == before + 1
    page.until(lambda: page.text("#state") == "ready", "the adapter is ready")


def test_a_name_that_is_markup_shows_as_text(opened, page):
    write_python_model(opened.folder / "plain")
    with opened.adapter.client() as client:
        client.load_model(EVIL, opened.folder / "plain")
        page.until(lambda: EVIL in page.rows(), "its name is in the table")
        page.until(lambda: EVIL in page.text(".legend"), "and in the legend, once it is measured")
        client.unload_model(EVIL)
    page.until(lambda: any(EVIL in each for each in page.events()), "its name is in the events")
    assert page.run("return document.images.length") == 0


def test_the_policy_lets_no_markup_be_written(page):
    script = """
      try { document.body.innerHTML = '<b>x</b>'; return 'written'; }
      catch (error) { return error.name; }"""
    assert page.run(script) == "TypeError"
    assert any("TrustedHTML" in each["message"] for each in page.log())


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_scrolls_down_alone(opened, page, is_dark):
    opened.load(SMALL)
    assert opened.load("a-name-without-any-place-to-break-it" * 4) == 404  # and shown
    page.open(opened.adapter.admin, PHONE, is_dark=is_dark)
    page.until(lambda: SMALL in page.rows(), "the model is there")
    width, inner = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert (width, inner) == (PHONE[0], PHONE[0])
    inside = (
        "const one = document.querySelector('.wide'); return one.scrollWidth <= one.clientWidth"
    )
    assert page.run(inside)
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(17, 22, 29)") is is_dark


def test_page_only_reads_until_a_button_is_pressed(opened, browser):
    browser.open(opened.adapter.admin)
    asked: set[str] = set()

    def has_polled() -> bool:
        asked.update(browser.methods())
        return len(asked) > 0

    browser.until(has_polled, "it has asked")
    assert asked == {"GET"}
    with Client(opened.adapter.admin) as admin:
        text = admin.get("/").body.decode()
        assert admin.post("/").status == 405
    assert "innerHTML" not in text
    assert "<form" not in text


def test_absent_adapter_is_told_and_its_return(opened, browser):
    browser.open(opened.adapter.admin)
    opened.adapter.process.send_signal(signal.SIGSTOP)
    try:
        browser.until(lambda: "no answer since" in browser.text("#state"), "it is told")
    finally:
        opened.adapter.process.send_signal(signal.SIGCONT)
    browser.until(lambda: browser.text("#state") == "ready", "it goes on")


def test_page_shows_a_drain(browser):
    with embedded_adapter("--examples") as adapter, Client(adapter.admin) as admin:
        browser.open(adapter.admin)
        assert browser.text("#state") == "ready"
        assert admin.post("/drain?timeout=10").status == 200
        browser.until(lambda: browser.text("#state") == "draining", "it drains")
        assert browser.text("#reasons") == "draining"
        at = adapter.admin
    assert f"Watch it in a browser: http://{at}/\n" in adapter.errors
