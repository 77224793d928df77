"""The store's part of the page, before a real adapter, Triton and folder of models."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.endpoint.folder_store import Store
from tests.journeys.page.browser import PHONE, Browser
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, unload_all
from tests.trees import infer_body, write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.timeout(400)]

TOKEN = "canary-of-the-page-7f3a9c0e51d2"  # noqa: S105 - it opens nothing else
# names that are markup, have quotes, lines, or are as long as a key may be
HOSTILE = (
    "<img src=x onerror=alert(1)>.tar.gz",
    "\"quoted' & <script>alert(2)</script.tar.gz",
    "two\nlines\tand \u202e a turn.tar.gz",
    f"{'n' * 240}/{'m' * 240}/{'k' * 20}.tar.gz",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    sampled = write_python_model(folder / "sampled", answer="values = values + 1")
    (sampled / "sample.json").write_text(json.dumps(infer_body(41.0)))
    write_python_model(folder / "plain")
    store = Store(folder)
    store.put("team-a/packed.tar.gz", 1)
    for name in HOSTILE:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"no archive")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A model root, whose model has a link in the place of its sample."""
    root = tmp_path_factory.mktemp("root")
    linked = write_python_model(root / "linked")
    (root / "elsewhere.json").write_text(json.dumps(infer_body(1.0)))
    (linked / "sample.json").symlink_to(root / "elsewhere.json")
    return root


@pytest.fixture(scope="module")
def adapter(folder, root, tmp_path_factory) -> Iterator[RunningAdapter]:
    cache = tmp_path_factory.mktemp("cache")
    flags = (f"--model-store={folder}", f"--cache-dir={cache}", f"--model-roots={root}")
    with embedded_adapter(*flags, "--on-demand", COMPLETE) as running:
        yield running


@pytest.fixture
def page(adapter, browser) -> Iterator[Browser]:
    """The page with its store read; the browser has nothing to complain of."""
    browser.open(adapter.admin)
    browser.until(lambda: "sampled" in shelf(browser), "the store is shown")
    yield browser
    assert [each for each in browser.log() if "401" not in each["message"]] == []
    unload_all(adapter)


def shelf(browser: Browser) -> dict[str, str]:
    """Return the rows of the store's table by the names of their models."""
    script = """
      return [...document.querySelectorAll("#shelf tr")].map(
        (row) => [row.querySelector(".name").textContent, row.innerText])"""
    return {name: " ".join(text.split()) for name, text in browser.run(script)}


def click(browser: Browser, name: str, what: str) -> None:
    """Click the name of a model of the store, or the button of its row."""
    script = """
      const row = [...document.querySelectorAll("#shelf tr")].find(
        (row) => row.querySelector(".name").textContent === arguments[0]);
      row.querySelector(arguments[1]).click();"""
    browser.run(script, name, what)


def test_store_shows_each_model_with_its_place(page):
    rows = shelf(page)

    assert "in the store" in rows["plain"]
    assert rows["plain"].endswith(" Load")
    assert "bytes" in rows["plain"]
    assert page.text("#store-counts").startswith("7 models")


def test_buttons_load_pin_and_unload_a_model(page):
    click(page, "sampled", ".act")
    page.until(lambda: "Loaded in" in page.text("#said"), "it is loaded")
    page.until(lambda: "in memory" in shelf(page)["sampled"], "its row")
    assert "pinned" in shelf(page)["sampled"]
    page.until(lambda: "in memory" in page.text("#one-facts"), "its facts")
    assert page.run("return document.getElementById('one-load').disabled")
    page.run("document.getElementById('one-close').click()")

    click(page, "sampled", ".act")
    page.until(lambda: "Unloaded in" in page.text("#said"), "it is unloaded")
    page.until(lambda: "on disk" in shelf(page)["sampled"], "its files stay")


def test_sample_of_the_package_is_sent(page):
    """The trial loads the model as a call does, so that it may be evicted again."""
    click(page, "sampled", ".name")
    page.run("document.getElementById('one-send').click()")
    page.until(lambda: "Answered in" in page.text("#said"), "the answer")

    answer = json.loads(page.text("#one-answer"))
    assert answer["outputs"][0]["data"] == [42.0]
    page.until(lambda: "in memory" in shelf(page)["sampled"], "its row")
    assert "pinned" not in shelf(page)["sampled"]
    page.until(lambda: page.text("#one-load") == "Pin", "it may be pinned")
    page.run("document.getElementById('one-load').click()")
    page.until(lambda: "pinned" in shelf(page)["sampled"], "it is pinned")


def test_own_request_is_sent_and_faults_are_told(page):
    click(page, "plain", ".name")
    page.run("document.getElementById('one-send').click()")
    page.until(lambda: "has no sample.json" in page.text("#said"), "the fault")
    body = json.dumps(infer_body(7.0))
    page.run("document.getElementById('one-request').value = arguments[0]", body)
    page.run("document.getElementById('one-send').click()")
    page.until(lambda: "Answered in" in page.text("#said"), "the answer")
    assert json.loads(page.text("#one-answer"))["outputs"][0]["data"] == [7.0]

    page.run("document.getElementById('one-request').value = '{'")
    page.run("document.getElementById('one-send').click()")
    page.until(lambda: page.text("#said").startswith("plain: 400:"), "the fault of the request")
    page.log()  # Chromium logs each status above 399


def test_sample_that_is_a_link_is_not_read(adapter):
    """Whoever may write a package is not to read other files of the machine by it."""
    with Client(adapter.admin, timeout=120) as admin:
        assert admin.post("/load?model_id=linked").status == 200
        refused = admin.post("/infer?model_id=linked")
        assert (refused.status, "has no sample.json" in refused.error) == (400, True)
        assert admin.post("/infer?model_id=linked", infer_body(2.0)).status == 200
        assert admin.post("/unload?model_id=linked").json()["status"] == "unloaded"
        assert admin.post("/unload?model_id=linked").status == 404
        assert admin.post("/infer?model_id=nobody", infer_body(2.0)).status == 404
        assert admin.post("/load").status == 400


def test_trial_bounds_body_and_answer(adapter):
    with Client(adapter.admin, timeout=120) as admin:
        large = infer_body(*[1.0] * 300_000)
        assert admin.post("/infer?model_id=plain", large).status == 413
        longer = infer_body(*[0.1] * 190_000)  # 0.10000000149011612 is what comes back
        answer = admin.post("/infer?model_id=plain", longer)
        assert (answer.status, "more than this page shows" in answer.body.decode()) == (400, True)
        assert admin.post("/infer?model_id=plain", infer_body(2.0)).status == 200


def test_hostile_names_are_text_in_store(page):
    rows = shelf(page)

    assert set(HOSTILE) <= set(rows)
    assert page.run("return document.images.length") == 0
    assert page.run("return document.scripts.length") == 1
    for name in HOSTILE:
        click(page, name, ".act")
        page.until(lambda: page.text("#said.bad"), "the failure")
        assert page.run("return document.getElementById('one-name').textContent") == name
        page.run("document.getElementById('one-close').click()")
    assert page.run("return document.images.length") == 0
    page.log()


@pytest.mark.parametrize("size", [PHONE, (1280, 900)])
def test_no_name_makes_the_page_wider(adapter, page, size):
    page.open(adapter.admin, size)
    page.until(lambda: HOSTILE[3] in shelf(page), "the store is shown")
    width, inner = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert (width, inner) == (size[0], size[0])
    inside = """
      return [...document.querySelectorAll('.wide')].every(
        (one) => one.scrollWidth <= one.clientWidth)"""
    assert page.run(inside)
    click(page, HOSTILE[3], ".name")
    inside = "const one = document.querySelector('#one'); return one.scrollWidth <= one.clientWidth"
    assert page.run(inside)


def test_filter_and_glob_ask_the_adapter(page):
    for text in ("team-a/*", "PACKED"):
        page.run(
            "const field = document.getElementById('store-filter'); field.value = arguments[0];"
            "field.dispatchEvent(new Event('input'))",
            text,
        )
        page.until(lambda: list(shelf(page)) == ["team-a/packed.tar.gz"], f"by {text}")


def test_page_asks_for_the_token_and_sends_it(folder, tmp_path, browser):
    flags = (f"--model-store={folder}", f"--cache-dir={tmp_path}", "--on-demand", COMPLETE)
    with embedded_adapter(*flags, environ={"ADAPTER_CONTROL_TOKEN": TOKEN}) as adapter:
        browser.open(adapter.admin)
        browser.until(lambda: "plain" in shelf(browser), "the store is shown")
        assert browser.text("#token-field") == ""
        click(browser, "plain", ".act")
        browser.until(lambda: "401" in browser.text("#said"), "it is refused")
        assert "control token" in browser.text("#token-field")
        assert "in the store" in shelf(browser)["plain"]
        browser.run("document.getElementById('token').value = arguments[0]", TOKEN)
        browser.run("document.getElementById('one-load').click()")
        browser.until(lambda: "Loaded in" in browser.text("#said"), "it is loaded")
        stored = "return localStorage.length + sessionStorage.length + document.cookie.length"
        assert browser.run(stored) == 0
    browser.log()


def test_signed_calls_alone_reach_models_without_a_token(folder, tmp_path):
    """The page's calls are not signed: with keys and no token nobody may make them."""
    flags = (f"--model-store={folder}", f"--cache-dir={tmp_path}", COMPLETE)
    keys = "--endpoint-keys=AKID env:SECRET_OF_TESTS *"
    with (
        embedded_adapter(*flags, keys, environ={"SECRET_OF_TESTS": "s" * 40}) as adapter,
        Client(adapter.admin) as admin,
    ):
        statuses = {
            verb: admin.post(f"/{verb}?model_id=plain", infer_body(1.0)).status
            for verb in ("load", "unload", "infer")
        }
        assert statuses == dict.fromkeys(("load", "unload", "infer"), 403)
        assert admin.get("/store/models?name=plain").json()["where"] == "store"
