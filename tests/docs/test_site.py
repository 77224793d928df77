"""The site has every page, each link on it leads somewhere, and nothing comes from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import ROOT, blocks, pages, shown
from tests.journeys.page.browser import chromium

# What a browser loads by itself.
LOST = "lost" + ".md"  # no page that a test of the pages is to look for
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Seen(HTMLParser):
    """The links, loaded files and classes of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.classes: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.classes.update((given.get("class") or "").split())
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]):
            self.loaded.append(given[LOADED[tag]])


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    laid_out = subprocess.run([sys.executable, "scripts/lay_out_site.py"], check=False, cwd=root)
    assert laid_out.returncode == 0
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out],
        check=False,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def seen(site: Path) -> dict[Path, Seen]:
    return {page: Seen(page) for page in site.rglob("*.html") if page.name != "404.html"}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what the site is made of, to spoil."""
    for path in [*pages(), ROOT / "mkdocs.yml", ROOT / "LICENSE", ROOT / "scripts/lay_out_site.py"]:
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    for path in (ROOT / "docs").rglob("*"):
        if path.is_file() and path.suffix != ".md":
            place = tmp_path / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    return tmp_path


def place_of(page: Path) -> str:
    path = shown(page).removesuffix(".md")
    return re.sub(r"(^|/)README$", r"\1index", path) + ".html"


def test_each_repository_page_is_on_the_site(site):
    assert [shown(page) for page in pages() if not (site / place_of(page)).is_file()] == []


def test_each_page_is_reached_from_navigation(site):
    linked = set(Seen(site / "index.html").links)

    assert [p for p in map(place_of, pages()) if p not in linked and p != "index.html"] == []


def test_no_page_loads_anything_from_elsewhere(site, seen):
    loaded = {link for page in seen.values() for link in page.loaded}
    styles = [file.read_text() for kind in ("css", "svg") for file in site.rglob(f"*.{kind}")]

    assert loaded
    assert [link for link in loaded if urlsplit(link).netloc] == []
    assert [url for text in styles for url in re.findall(r"url\(['\"]?(?:https?:)?//", text)] == []


def test_pages_fetch_nothing_for_the_theme(seen):
    """It fetches Mermaid where it meets a diagram."""
    assert [page.name for page, on_it in seen.items() if "mermaid" in on_it.classes] == []


def test_annotated_fence_is_code_on_the_site(site):
    noted = [block for page in pages() for block in blocks(page) if block.note]
    on_site = {shown(b.page): (site / place_of(b.page)).read_text("utf-8") for b in noted}

    assert len(noted) > 20
    assert [page for page, text in on_site.items() if "```" in text] == []


@pytest.mark.slow
def test_search_works_on_pages_opened_as_files(site, tmp_path):
    with chromium(tmp_path) as browser:
        browser.requests()  # of the browser's own first page
        browser.driver.get((site / "index.html").as_uri())
        browser.run(
            "document.querySelector('[data-md-toggle=search]').click();"
            "const field = document.querySelector('.md-search__input'); field.focus();"
            "field.value = 'memory_reserve';"
            "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));"
        )
        hits = "return document.querySelectorAll('.md-search-result__item').length"
        browser.until(lambda: browser.run(hits), "hits")
        loaded = browser.requests()

    assert [url for url in loaded if urlsplit(url).scheme.startswith("http")] == []


def test_site_lists_its_pages_for_programs(site):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"^- \[.+\]\((.+)\)$", text, re.MULTILINE)

    assert text.startswith("# triton-adapter\n\n> ")
    assert {place_of(page) for page in pages()} == set(links)
    assert [link for link in links if not (site / link).is_file()] == []


def test_site_with_dead_link_is_not_written(sources):
    """Nor one with a page outside the navigation."""
    spoilt = [
        ("docs/stores.md", "[x](no-such-page)", "no-such-page"),
        ("docs/stores.md", "[x](memory.md#no-such-heading)", "no-such-heading"),
        ("docs/stores.md", "[x](#no-such-own-heading)", "no-such-own-heading"),
        ("README.md", "[x](no/such.py)", "no/such.py"),
        (f"docs/{LOST}", "# Lost", LOST),
    ]
    for page, text, _ in spoilt:
        with (sources / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")

    done = build(sources, sources / "out")

    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert [each for _, _, each in spoilt if each not in said] == []
