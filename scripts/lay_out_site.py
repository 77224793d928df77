"""Lay out the pages of the repository for the site, in the folder dist/pages.

They keep their paths, so that a link means the same on the site, on a Git host and in an editor.
What suits only these is changed for the site: the notes behind the language of a fence, Mermaid's
diagrams of states, and links that show the name of a file. mkdocs.yml needs no hooks, so that
another program that reads it can build the site as well.

llms.txt lists the pages for programs that read them: see https://llmstxt.org.
"""

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("dist/pages")
FOLDERS = ("docs", "examples", "charts", "deploy")
# The licence is shown only with an ending that browsers know.
LICENSE = ("LICENSE", "LICENSE.txt")
# Pages about how it came to be are found behind those about how it is used.
_BACKGROUND = (
    "docs/decisions/",
    "docs/design/",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/modules.md",
)
_FEWER_HITS = "---\nsearch:\n  boost: 0.2\n---\n\n"
# An opening fence with more than its language: "```sh not-run: needs a cluster".
_NOTED = re.compile(r"^( *`{3,}\w+) [^\n`]+$", re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ARROW = re.compile(r"^ *(\S+) --> ([^\s:]+)(?:: (\S+))?$", re.MULTILINE)
_FILE_LINK = re.compile(r"\[[\w./-]+\.md\]\((?P<path>[^)#\s]+\.md)(?P<anchor>#[^)\s]+)?\)")
_TITLE = re.compile(r"^# +(.+)$", re.MULTILINE)
# lines of the navigation in mkdocs.yml: a part, and a page with or without a title of its own
_PART = re.compile(r"^  - (?P<part>[^:]+):$")
_ENTRY = re.compile(r"^ +- (?:(?P<quote>'?)(?P<title>.+?)(?P=quote): )?(?P<path>\S+\.md)$")


def find_pages(root: Path) -> Iterator[str]:
    """Yield the paths of all pages."""
    folders = [root.glob("*.md"), *((root / folder).rglob("*.md") for folder in FOLDERS)]
    for pages in folders:
        yield from sorted(page.relative_to(root).as_posix() for page in pages)


def read_navigation(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the path and title of each page by the part of mkdocs.yml that it is in. A page
    without a title of its own has an empty one.
    """
    parts: dict[str, list[tuple[str, str]]] = {}
    part = ""
    for line in text.partition("\nnav:\n")[2].splitlines():
        if match := _PART.match(line):
            part = match["part"]
        elif match := _ENTRY.match(line):
            parts.setdefault(part, []).append((match["path"], match["title"] or ""))
    return parts


def convert(path: str, markdown: str, titles: Mapping[str, str]) -> str:
    """Return a page as the site shows it."""
    folder = posixpath.dirname(path)

    def show_title(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        return f"[{titles.get(target, target)}]({link['path']}{link['anchor'] or ''})"

    text = _DIAGRAM.sub(_write_table, _FILE_LINK.sub(show_title, markdown))
    text = _NOTED.sub(r"\1", text).replace(f"]({LICENSE[0]})", f"]({LICENSE[1]})")
    return _FEWER_HITS + text if path.startswith(_BACKGROUND) else text


def _write_table(diagram: re.Match[str]) -> str:
    """Write the arrows of a diagram as a table: Mermaid's script would come from elsewhere."""
    rows = [
        f"| {before} | {event} | {after} |".replace("[*]", "(none)")
        for before, after, event in _ARROW.findall(diagram[1])
    ]
    return "\n".join(["| from | event | to |", "| --- | --- | --- |", *rows])


def place_of(path: str) -> str:
    """Return where the site has a page."""
    return re.sub(r"(^|/)README$", r"\1index", path.removesuffix(".md")) + ".html"


def write_llms(
    description: str, parts: Mapping[str, list[tuple[str, str]]], titles: Mapping[str, str]
) -> str:
    lines = ["# triton-adapter", "", f"> {description}"]
    for part, pages in parts.items():
        lines += ["", f"## {part}", ""]
        lines += [f"- [{titles[path]}]({place_of(path)})" for path, _ in pages]
    return "\n".join([*lines, ""])


def lay_out(root: Path, out: Path) -> None:
    """Write all that the site is made of to a folder, anew."""
    shutil.rmtree(out, ignore_errors=True)
    texts = {path: (root / path).read_text(encoding="utf-8") for path in find_pages(root)}
    config = (root / "mkdocs.yml").read_text(encoding="utf-8")
    parts = read_navigation(config)
    titles = {
        path: title[1].replace("`", "")
        for path, text in texts.items()
        if (title := _TITLE.search(text))
    }
    titles |= {path: title for pages in parts.values() for path, title in pages if title}
    for path, text in texts.items():
        page = out / path
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(convert(path, text, titles), encoding="utf-8")
    for file in (root / "docs").rglob("*.*"):
        if file.suffix != ".md":
            place = out / file.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    shutil.copy(root / LICENSE[0], out / LICENSE[1])
    description = re.search(r"^site_description: (.+)$", config, re.MULTILINE)
    text = write_llms(description[1] if description else "", parts, titles)
    (out / "llms.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    lay_out(ROOT, ROOT / OUT)
    sys.exit(0)
