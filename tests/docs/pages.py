"""The pages of the project, and the fenced blocks on them.

What a fence says behind its language, the first word or two, is what the tests do with the block:

    (nothing)            run it, with everything that stands before it on the page
    server               start it, wait until the adapter is ready, leave it for what follows
    refused              run it; it is there to show a failure, and must fail
    run-by: tests/...    that test runs it
    not-run: REASON      nobody runs it

`json answer` is what the block before it must have printed, among other things.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CLI = ROOT / "docs" / "cli.md"
FOLDERS = ("docs", "examples", "charts", "deploy")
RUNNABLE = frozenset({"sh", "bash", "console", "python"})
# Languages of what is there to be read.
DATA = frozenset(
    {"diff", "dockerfile", "ini", "json", "mermaid", "pbtxt", "promql", "text", "yaml"}
)
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=mark) *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    note: str
    text: str

    @property
    def mode(self) -> str:
        return self.note.partition(":")[0]

    @property
    def reason(self) -> str:
        return self.note.partition(":")[2].strip()

    @property
    def is_runnable(self) -> bool:
        return self.language in RUNNABLE

    @property
    def is_run_here(self) -> bool:
        return self.is_runnable and self.mode in {"", "server", "refused"}

    def __str__(self) -> str:
        return f"{shown(self.page)}:{self.line}"


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages() -> list[Path]:
    return sorted(ROOT.glob("*.md")) + [
        page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))
    ]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of titles, as GitHub makes them, and those of `<a id>`."""
    text = without_blocks(page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    of_titles = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return of_titles | set(re.findall(r'<a id="([^"]+)">', text))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, note = match["info"].strip().partition(" ")
        body = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, note.strip(), body))
    return found
