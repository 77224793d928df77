"""The documentation says what the code has, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from adapter import errors
from adapter.core.state import ModelState
from adapter.frontends.status import HTTP
from adapter.log import EVENTS
from adapter.metrics import Metrics
from adapter.settings import Settings, flag_of, variable_of
from tests.docs.pages import ROOT, pages, shown, without_blocks

DOCS = ROOT / "docs"
PAGES = pages()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/.]+?)/?`")
MACHINE = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users|mnt|private)/")


def generate(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gen_docs.py", *flags]
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )


def rows(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("|")]


def has_row(page: str, *cells: str) -> bool:
    return any(all(f"| {cell} |" in row for cell in cells) for row in rows(page))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation gone, blanks to hyphens."""
    text = without_blocks(page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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


def test_the_generated_pages_are_current():
    check = generate("--check")

    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_setting_has_its_line(name):
    assert has_row("settings.md", f"`{name}`", f"`{flag_of(name)}`", f"`{variable_of(name)}`")


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_has_its_line(name):
    assert has_row("events.md", f"`{name}`")


@pytest.mark.parametrize("kind", HTTP, ids=lambda kind: kind.__name__)
def test_an_error_has_its_line_with_status_and_code(kind):
    status, code = HTTP[kind]

    assert has_row("errors.md", str(status), f"`{code}`", f"`{kind.__name__}`")


@pytest.mark.parametrize("code", ["MethodNotAllowed", "InternalError"])
def test_a_code_that_stands_for_no_class_has_its_line(code):
    assert has_row("errors.md", f"`{code}`")


def test_every_figure_of_a_capacity_error_is_explained():
    text = (DOCS / "errors.md").read_text(encoding="utf-8")

    for figure in (*errors.MemoryFigures.__dataclass_fields__, "matched"):
        assert f"`{figure}`" in text


def test_a_metric_has_its_line():
    for family in Metrics().registry.collect():
        total = "_total" if family.type == "counter" else ""
        assert has_row("metrics.md", f"`{family.name}{total}`", family.type)


@pytest.mark.parametrize("name", ["adapter_models", "adapter_memory_bytes", "adapter_triton_live"])
def test_a_gauge_has_its_line(name):
    assert has_row("metrics.md", f"`{name}`", "gauge")


@pytest.mark.parametrize("state", ModelState)
def test_a_state_is_drawn_and_explained(state):
    assert f"--> {state.value}:" in (DOCS / "states.md").read_text(encoding="utf-8")
    assert has_row("states.md", state.value)


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_relative_link_leads_somewhere(page):
    assert [link for link in links(page) if broken(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_the_tests_that_a_page_cites_exist(page):
    cited = TEST.findall(page.read_text(encoding="utf-8"))

    assert [path for path in cited if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_page_mentions_a_path_of_somebodys_machine(page):
    assert MACHINE.findall(page.read_text(encoding="utf-8")) == []


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
