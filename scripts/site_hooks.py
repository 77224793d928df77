"""Hooks of mkdocs: the site has the pages of the whole repository, at the paths they have there.

So a link means the same on the site, on a Git host and in an editor. What suits only these is
changed for the site: the notes behind the language of a fence, Mermaid's diagrams of states, and
links that show the name of a file.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "examples", "charts", "deploy")
# What pages link to beside pages; the licence is shown only with an ending that browsers know.
LICENSE = ("LICENSE", "LICENSE.txt")
# An opening fence with more than its language: "```sh not-run: needs a cluster".
_NOTED = re.compile(r"^( *`{3,}\w+) [^\n`]+$", re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ARROW = re.compile(r"^ *(\S+) --> ([^\s:]+)(?:: (\S+))?$", re.MULTILINE)
_FILE_LINK = re.compile(r"\[[\w./-]+\.md\]\((?P<path>[^)#\s]+\.md)(?P<anchor>#[^)\s]+)?\)")
# Pages about how it came to be are found behind those about how it is used.
_BACKGROUND = (
    "docs/decisions/",
    "docs/design/",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/modules.md",
)
_INLINE_CODE = re.compile(r"(?<=<code>)[^<\n]+(?=</code>)")

_titles: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take every file at its path in the repository, and the pages outside docs/ as well."""
    docs = Path(config.docs_dir)
    for file in [each for each in files if each.src_dir == config.docs_dir]:
        files.remove(file)
        if not file.is_documentation_page():
            path = (docs / file.src_uri).relative_to(ROOT).as_posix()
            # style sheets are named in mkdocs.yml by the place where they end up
            place = file.dest_uri if file.src_uri.startswith("assets/") else path
            files.append(_file(path, config, place))
    for page in _pages():
        files.append(_file(page.relative_to(ROOT).as_posix(), config))
    files.append(_file(LICENSE[0], config, LICENSE[1]))
    return files


def _pages() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.md"))


def _file(path: str, config: MkDocsConfig, place: str | None = None) -> File:
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=place)


def on_nav(nav: Navigation, **_: object) -> Navigation:
    _titles.update({page.file.src_uri: page.title for page in nav.pages if page.title})
    return nav


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    folder = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri.startswith(_BACKGROUND):
        page.meta["search"] = {"boost": 0.2}

    def titled(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        return f"[{_titles.get(target, target)}]({link['path']}{link['anchor'] or ''})"

    return _NOTED.sub(r"\1", _DIAGRAM.sub(_table, _FILE_LINK.sub(titled, markdown)))


def _table(diagram: re.Match[str]) -> str:
    """Write the arrows of a diagram as a table: Mermaid's script would come from elsewhere."""
    rows = [
        f"| {before} | {event} | {after} |".replace("[*]", "(none)")
        for before, after, event in _ARROW.findall(diagram[1])
    ]
    return "\n".join(["| from | event | to |", "| --- | --- | --- |", *rows])


def on_page_content(html: str, **_: object) -> str:
    """Let long names in code wrap between their words."""
    return _INLINE_CODE.sub(
        lambda code: re.sub(r"(?<=\w)([_/.=-])(?=\w)", r"\1<wbr>", code[0]), html
    )
