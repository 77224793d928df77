"""Pages and the texts of the code are in short sentences, without the expressions of a ban list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, without_blocks

LONGEST = 25
MOST_WORDS = 38_000
BANNED = re.compile(
    r"\b(?:is|are|was|were|be|being|been) (?:told|had)\b|\blets? go\b|\bby itself\b|\blies\b"
    r"|\bas it is\b|\bnobody is\b",
    re.IGNORECASE,
)
BANNED_SUBJECT = re.compile(r"^(?:what|which|nobody|that there)\b(?!.*\?)", re.IGNORECASE)
# words of Triton, of backends and of numpy, by which a failure is known
FOREIGN = {ROOT / "adapter" / "core" / "oom_rules.py"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"),
    *(ROOT / "examples").rglob("*.md"),
]
GENERATED = {
    f"{name}.md" for name in ("settings", "events", "errors", "metrics", "states", "modules")
}
_TITLE_OR_ROW = ("|", "#", "![", "[![")
_ITEM = r"(?:[-*]|\d+\.) "


def sentences(text: str) -> Iterator[str]:
    """Those of a page outside tables, titles and blocks; a link counts as its text."""
    text = re.sub(r"<!--.*?-->", "", without_blocks(text), flags=re.DOTALL)
    for part in re.split(rf"\n\s*\n|\n(?=\s*{_ITEM}|#|\|)", text):
        if part.strip().startswith(_TITLE_OR_ROW):
            continue
        bare = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", part.strip())
        bare = " ".join(re.sub(rf"^{_ITEM}", "", bare).split())
        yield from re.split(r"(?<=[.!?:])[\"*)]* ", bare)


def rows(text: str) -> list[str]:
    return re.findall(r"^\|.*", without_blocks(text), re.MULTILINE)


def texts(path: Path) -> Iterator[str]:
    """The strings of a module but docstrings; `X` stands for what is filled in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    seen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            seen.add(node.value)
        if isinstance(node, ast.JoinedStr):
            seen.update(part for part in ast.walk(node) if part is not node)
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in seen:
            yield node.value


def is_long(sentence: str) -> bool:
    return len([word for word in sentence.split() if re.search(r"\w", word)]) > LONGEST


def faults(sentence: str) -> list[str]:
    spoken = re.sub(r"`[^`]*`", "X", sentence)
    found = BANNED.search(spoken) or BANNED_SUBJECT.search(spoken)
    return [*(["long"] if is_long(sentence) else []), *([found[0]] if found else [])]


def test_pages_are_in_short_sentences_without_banned_expressions() -> None:
    found = {
        (str(page.relative_to(ROOT)), sentence): faults(sentence)
        for page in PAGES
        for sentence in sentences(page.read_text(encoding="utf-8"))
    }
    assert len(found) > 1000
    assert {where: what for where, what in found.items() if what} == {}


def test_pages_keep_to_their_number_of_words() -> None:
    """Counted as `wc -w` does. A page that grows makes room: it or another one loses as much."""
    written = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "docs/design/triton.md"]
    counts = {
        str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split())
        for page in written
        if page.name not in GENERATED
    }

    assert len(counts) > 25
    assert sum(counts.values()) <= MOST_WORDS, sorted(counts.items(), key=lambda each: -each[1])


def test_tables_are_without_banned_expressions() -> None:
    found = [row for page in PAGES for row in rows(page.read_text(encoding="utf-8"))]

    assert len(found) > 500
    assert [row for row in found if BANNED.search(re.sub(r"`[^`]*`", "X", row))] == []


def test_texts_have_short_sentences_without_banned_words() -> None:
    found = [
        (str(path.relative_to(ROOT)), sentence)
        for path in sorted((ROOT / "adapter").rglob("*.py"))
        if "_proto" not in path.parts and path not in FOREIGN
        for text in texts(path)
        for sentence in re.split(r"(?<=[.;!?:]) |\n", text)
    ]

    assert len(found) > 1000
    assert [one for one in found if is_long(one[1]) or BANNED.search(one[1])] == []
