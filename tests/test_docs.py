"""The documentation says what the code has, and its links lead somewhere."""

import re
from pathlib import Path

from adapter import errors
from tests.docs.pages import ROOT, anchors, pages, shown, without_blocks

DOCS = ROOT / "docs"
PAGES = pages()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/.]+?)/?`")
MACHINE = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users|mnt|private)/")


def links(page: Path) -> list[str]:
    found = LINK.findall(without_blocks(page.read_text(encoding="utf-8")))
    return [
        link
        for pair in found
        for link in pair
        if link and "://" not in link and not link.startswith("mailto:")
    ]


def broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors(target)


def test_every_figure_of_a_capacity_error_is_explained():
    text = (DOCS / "errors.md").read_text(encoding="utf-8")

    for figure in (*errors.MemoryFigures.__dataclass_fields__, "matched"):
        assert f"`{figure}`" in text


def test_every_relative_link_leads_somewhere():
    found = {shown(page): [link for link in links(page) if broken(page, link)] for page in PAGES}

    assert {page: links for page, links in found.items() if links} == {}


def test_the_tests_that_a_page_cites_exist():
    cited = [path for page in PAGES for path in TEST.findall(page.read_text(encoding="utf-8"))]

    assert len(cited) > 50
    assert [path for path in cited if not (ROOT / path).exists()] == []


def test_no_page_mentions_a_path_of_somebodys_machine():
    found = {shown(page): MACHINE.findall(page.read_text(encoding="utf-8")) for page in PAGES}

    assert {page: paths for page, paths in found.items() if paths} == {}


def test_every_page_can_be_found_from_the_index():
    index = DOCS / "index.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}

    assert [shown(page) for page in DOCS.rglob("*.md") if page not in {index, *linked}] == []


def test_each_make_target_of_the_development_page_exists():
    described = re.findall(
        r"^\| `make (\w+)` \|", (DOCS / "development.md").read_text(), re.MULTILINE
    )
    targets = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert sorted(described) == sorted(set(targets) - {"help", "setup"})
