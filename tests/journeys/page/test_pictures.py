"""The pictures of docs/images. Each run takes them; `make pictures` puts them there."""

import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from tests.journeys.client.terminal import ESCAPE, ROOT, Terminal
from tests.journeys.page.scene import ARRIVES, LEAVES, SIZES, TOO_MUCH, Scene, scene

pytestmark = [pytest.mark.triton, pytest.mark.timeout(400)]

NAMES = ("page.png", "ps.svg")
MOST_BYTES = 200 * 1024
_COLUMNS, _LINES = 132, 15
# rich names a font of a server that the picture is to do without
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the pictures go."""
    given = os.environ.get("PICTURES")
    return Path(given) if given else tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Iterator[Scene]:
    """Three models that callers use, one that was evicted, one on its way, and one refused."""
    with scene(tmp_path_factory.mktemp("scene")) as found:
        assert found.load("support-chat") == 200
        assert found.call_for(LEAVES) == 200
        assert found.load("product-search") == 200
        assert found.load("fraud-score") == 200
        assert found.load(TOO_MUCH) == 507
        found.store.hold(0.8)
        found.call_for_what_arrives()
        with traffic(found):
            yield found


@contextmanager
def traffic(played: Scene) -> Iterator[None]:
    """Callers of two of the models."""
    is_over = threading.Event()

    def call(name: str, seconds: float) -> None:
        with played.adapter.client() as client:
            while not is_over.wait(seconds):
                client.invoke(name)

    paces = {"support-chat": 0.02, "product-search": 0.06}
    callers = [threading.Thread(target=call, args=each) for each in paces.items()]
    for each in callers:
        each.start()
    yield
    is_over.set()
    for each in callers:
        each.join(30)


def test_the_page_is_taken(played, browser, folder):
    browser.open(played.adapter.admin)

    def is_complete() -> bool:
        rows = browser.rows()
        busy = [rows.get(name, "") for name in ("support-chat", "product-search")]
        is_busy = all(re.search(r"(measured|declared) \d+ [\d.]+ .* \d+ s$", row) for row in busy)
        return is_busy and "fetching" in rows.get(ARRIVES, "") and len(rows) == len(SIZES) + 1

    browser.until(is_complete, "the scene")
    assert TOO_MUCH in browser.text("#last")
    assert any(f"evicted {LEAVES}" in each for each in browser.events())
    # four of the events are enough: a picture of all is larger than a README should have
    script = "return document.querySelector('#events li:nth-child(5)').getBoundingClientRect().top"
    height = browser.run(script)
    browser.picture(folder / "page.png", int(height))
    check(folder / "page.png")


def test_ps_is_taken(played, folder):
    size = {"COLUMNS": str(_COLUMNS), "LINES": str(_LINES)}
    environ = {"ADAPTER_ADMIN": played.adapter.admin, "ADAPTER_HTTP": played.adapter.http, **size}
    terminal = Terminal("ps", "--watch", environ=environ)
    said = terminal.until(f"(?s)REQ/S.*{ESCAPE}\\[H")
    terminal.press("\x03")
    assert terminal.end() == 0
    # Ctrl-C may cut the last view; one that another view follows is whole
    *whole, _ = said.split(f"{ESCAPE}[H")
    frame = [each for each in whole if "REQ/S" in each][-1]
    assert TOO_MUCH in frame
    drawn = Console(record=True, width=_COLUMNS, file=io.StringIO())
    lines = "\n".join(line.rstrip() for line in frame.rstrip().splitlines())
    drawn.print(Text.from_ansi(f"{lines}\n", no_wrap=True, overflow="ellipsis"))
    text = drawn.export_svg(title="triton-adapter ps --watch", unique_id="ps")
    (folder / "ps.svg").write_text(_FONT.sub("", text), encoding="utf-8")
    check(folder / "ps.svg")


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("page.png", "README.md"),
        *((name, "docs/observability.md") for name in NAMES),
    ],
)
def test_picture_is_committed_and_shown_on_pages(name, page):
    picture = ROOT / "docs" / "images" / name
    check(picture)
    place = picture.relative_to((ROOT / page).parent)
    assert f"]({place})" in (ROOT / page).read_text(encoding="utf-8")


def check(picture: Path) -> None:
    """A picture is small, and asks nobody for a part of it."""
    content = picture.read_bytes()
    assert len(content) < MOST_BYTES
    if picture.suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        assert TOO_MUCH.encode() in content
        assert b"url(http" not in content
        assert b"@font-face" not in content
