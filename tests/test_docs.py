"""The documentation says what the code has, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from adapter import errors
from tests.docs.pages import ROOT, anchors, pages, shown, without_blocks

DOCS = ROOT / "docs"
PAGES = pages()
CODE = [
    path
    for folder in ("adapter", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/.]+?)/?`")
# A page that code names, and the heading behind it: `docs/memory.md, Admission`.
CITED = re.compile(r"(?<![\w/.*-])([\w/-]+\.md)\b(?:, ([A-Z][\w' -]+))?")
NUMBERED = re.compile(
    r"\.md,? \d|\.md\b[^.]{0,40}?\b(?:section|row|policy|fault)s? \d"
    r"|\b(?:[Ss]ection|[Rr]ow|[Pp]olicy|[Ff]ault)s? \d[^.]{0,40}?\.md\b"
)
CITED_TEST = re.compile(r"(?<![\w/'\"])tests/[\w/]+\.py\b")
MACHINE = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users|mnt(?!/models)|private)/")


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


def test_the_tests_that_a_page_cites_exist():
    cited = [path for page in PAGES for path in TEST.findall(page.read_text(encoding="utf-8"))]

    assert len(cited) > 50
    assert [path for path in cited if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def code() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in CODE}


def test_the_tests_that_code_cites_exist(code: dict[Path, str]):
    cited = {path for text in code.values() for path in CITED_TEST.findall(text)}

    assert cited
    assert [path for path in cited if not (ROOT / path).exists()] == []


def test_no_page_mentions_a_path_of_somebodys_machine():
    found = {shown(page): MACHINE.findall(page.read_text(encoding="utf-8")) for page in PAGES}

    assert {page: paths for page, paths in found.items() if paths} == {}


def cited_in(text: str) -> list[tuple[str, str]]:
    """Pages and headings that this code cites, over the ends of the lines of a comment."""
    return CITED.findall(re.sub(r"\s*\n\s*(?:# ?)?", " ", text))


def leads_nowhere(page: str, heading: str) -> bool:
    found = [path for path in PAGES if f"/{path}".endswith(f"/{page}")]
    if not heading:
        return not found
    named = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")}
    return not any(anchor for path in found for anchor in anchors(path) & named)


def test_code_cites_pages_and_headings_that_exist(code: dict[Path, str]):
    found = {
        shown(path): [one for one in cited_in(text) if leads_nowhere(*one)]
        for path, text in code.items()
        if ".md" in text
    }

    assert {path: cited for path, cited in found.items() if cited} == {}


def test_links_in_texts_lead_somewhere(code: dict[Path, str]):
    adapter = [text for path, text in code.items() if (ROOT / "adapter") in path.parents]
    found = {link for text in adapter for link in re.findall(r"docs/[\w-]+\.md#[\w-]+", text)}

    assert len(found) > 3
    assert [link for link in sorted(found) if broken(ROOT / "README.md", link)] == []


def test_code_cites_no_page_by_number(code: dict[Path, str]):
    found = {shown(path): NUMBERED.findall(text) for path, text in code.items() if ".md" in text}

    assert {path: cited for path, cited in found.items() if cited} == {}


def test_every_page_can_be_found_from_the_index():
    lists = (DOCS / "index.md", DOCS / "decisions" / "README.md")
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in lists for link in links(page)
    }

    assert lists[1] in linked
    assert [shown(page) for page in DOCS.rglob("*.md") if page not in {lists[0], *linked}] == []


def test_the_modules_that_the_architecture_page_names_exist():
    named = set(re.findall(r"`(?!tests/)([\w/]+\.py)`", (DOCS / "architecture.md").read_text()))
    modules = [f"/{path}" for path in (ROOT / "adapter").rglob("*.py")]

    assert named
    assert [name for name in named if not any(m.endswith(f"/{name}") for m in modules)] == []
