"""Counts what makes code hard to read, by folder. `make check` fails where a count has grown.

    check_style.py            compare with scripts/style_counts.json; exit code 1 if a count grew
    check_style.py --write    write the counts of today, after some have fallen
    check_style.py --list F   print each finding in the file or folder F

Patterns: a docstring that lists parameters (class-legend, doc-starts-with-parameter) or has no verb
(doc-fragment); a comment without a subject (comment-riddle); several attributes assigned on one
line (fields-on-one-line); `*(a, b)` in a call (packed-arguments); a walrus behind `and`
(buried-walrus); a function named by a clause instead of a verb (name-clause); a test named by more
than 8 words (test-name); a public function or class without a docstring (undocumented).

Tokens, without comments and docstrings, are shown and not compared.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = Path(__file__).with_name("style_counts.json")
CHECKED = ("adapter", "tests")
MAX_TEST_WORDS = 8
MAX_RIDDLE_WORDS = 14  # a longer comment has room for its noun

_LEGEND_START = re.compile(r"`\w+`")
_LEGEND_ITEM = re.compile(r"(?:^|[.;]\s+|,\s+)`\w+`(?::|\s+(?:is|are|has|says|returns|names)\b)")
_FRAGMENT = re.compile(
    r"(?:Of|To|What|As|By|Over|When|Where|From|With|Amid|Why|So|Also|Another|Up|None|No|On|In"
    r"|Between|Behind|Beside|Until|Once|For|But|Never|At|The same|The latest|How|Which|Who|More"
    r"|Most|Less|Not)\b"
)
_RIDDLE = re.compile(
    r"#\s*(?:[Ii]t|[Tt]hey|[Tt]hat|[Tt]hose|[Tt]hese|[Tt]his|[Oo]ne|[Ww]ho|[Ww]hat|else|and|then"
    r"|so|both|all|none)\b"
)
_CLAUSE_NAME = re.compile(
    r"_*(?:goes|comes|takes|lets?|tell|told|says?|said|looks?|must|may|no|so|what|who|whom|why|of"
    r"|to|at|in|until|with|without|unless|beside|behind|amid|over|past|through|never)(?:_\w+|)$"
)
_FIELDS_WORDS = re.compile(r"_*(?:to_\w+|in_flight|with_\w+|without_\w+|over_limit|in_use|tell)$")
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|fmt:|pragma|!|--)")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """A place that matches one of the patterns."""

    path: Path
    line: int
    pattern: str
    text: str

    def __str__(self) -> str:
        text = " ".join(self.text.split())[:140]
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.pattern}: {text}"


def find_in_docstrings(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Find docstrings that are a legend or a fragment."""
    for node in ast.walk(tree):
        if not isinstance(node, _DOCUMENTED):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line = node.body[0].lineno
        if _LEGEND_START.match(text) and not text.startswith("`-"):
            yield Finding(path, line, "doc-starts-with-parameter", text)
        elif _FRAGMENT.match(text):
            yield Finding(path, line, "doc-fragment", text)
        if isinstance(node, ast.ClassDef) and len(_LEGEND_ITEM.findall(text)) > 1:
            yield Finding(path, line, "class-legend", text)


def find_in_comments(path: Path, source: str) -> Iterator[Finding]:
    """Find short comments that begin with a pronoun. Only the first line of a block is judged."""
    last_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        stands_alone = not token.line[:column].strip()
        continues = stands_alone and last_line == line - 1
        last_line = line if stands_alone else 0
        if continues or _DIRECTIVE.match(token.string):
            continue
        if _RIDDLE.match(token.string) and len(token.string.split()) <= MAX_RIDDLE_WORDS:
            yield Finding(path, line, "comment-riddle", token.string)


def find_in_names(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Find functions named by a clause, and tests named by too many words."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if _CLAUSE_NAME.match(node.name) and not _FIELDS_WORDS.match(node.name):
            yield Finding(path, node.lineno, "name-clause", node.name)
        if node.name.startswith("test_") and node.name.count("_") > MAX_TEST_WORDS:
            yield Finding(path, node.lineno, "test-name", node.name)


def find_undocumented(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Find public functions, methods and classes without a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for member in node.body:
                is_documented = not isinstance(member, _DOCUMENTED) or ast.get_docstring(member)
                if not is_documented and not member.name.startswith("_"):
                    yield Finding(path, member.lineno, "undocumented", member.name)


def find_packing(path: Path, tree: ast.Module, lines: list[str]) -> Iterator[Finding]:
    """Find statements that do several things on one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            attributes = sum(isinstance(t, ast.Attribute) for t in node.targets[0].elts)
            if attributes > 1 and isinstance(node.value, ast.Tuple):
                yield Finding(path, node.lineno, "fields-on-one-line", lines[node.lineno - 1])
        elif isinstance(node, ast.Call):
            packed = (a for a in node.args if isinstance(a, ast.Starred))
            if any(isinstance(a.value, ast.Tuple) for a in packed):
                yield Finding(path, node.lineno, "packed-arguments", lines[node.lineno - 1])
        elif is_walrus_buried(node):
            yield Finding(path, node.lineno, "buried-walrus", lines[node.lineno - 1])


def is_walrus_buried(node: ast.AST) -> bool:
    """Return whether a statement has two walruses, or one that an earlier operand may skip."""
    if isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.BoolOp):
        return any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.value))
    if not isinstance(node, ast.If | ast.While):
        return False
    inner_nodes = list(ast.walk(node.test))
    later_operands = [
        operand
        for each in inner_nodes
        if isinstance(each, ast.BoolOp)
        for operand in each.values[1:]
    ]
    is_skippable = any(
        isinstance(inner, ast.NamedExpr) for each in later_operands for inner in ast.walk(each)
    )
    return is_skippable or sum(isinstance(each, ast.NamedExpr) for each in inner_nodes) > 1


def count_tokens(source: str, tree: ast.Module) -> int:
    """Return the number of tokens without comments, docstrings and layout."""
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstring_lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        token.type not in _LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstring_lines)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def read_files(places: tuple[str, ...]) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield the Python files of git below these paths, but for generated ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix == ".py" and "_proto" not in path.parts and path.exists():
            source = path.read_text(encoding="utf-8")
            yield path, source, ast.parse(source, filename=name)


def find_all(path: Path, source: str, tree: ast.Module) -> Iterator[Finding]:
    """Yield the findings in one file. Tests need no docstring."""
    yield from find_in_docstrings(path, tree)
    yield from find_in_comments(path, source)
    yield from find_in_names(path, tree)
    yield from find_packing(path, tree, source.splitlines())
    if path.relative_to(ROOT).parts[0] != "tests":
        yield from find_undocumented(path, tree)


def count_by_folder() -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return the findings by folder and pattern, and the tokens by folder."""
    findings: dict[str, Counter[str]] = {}
    tokens: Counter[str] = Counter()
    for path, source, tree in read_files(CHECKED):
        parts = path.relative_to(ROOT).parts
        folder = "/".join(parts[: min(2, len(parts) - 1)])
        counts = findings.setdefault(folder, Counter())
        counts.update(finding.pattern for finding in find_all(path, source, tree))
        tokens[folder] += count_tokens(source, tree)
    return {folder: dict(sorted(findings[folder].items())) for folder in sorted(findings)}, tokens


def compare(findings: dict[str, dict[str, int]], known: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each count that is higher than the known one."""
    grown = []
    for folder, counts in findings.items():
        for pattern, count in counts.items():
            before = known.get(folder, {}).get(pattern, 0)
            if count > before:
                grown.append(f"{folder}: {pattern}: {count}, was {before}")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the counts of today")
    parser.add_argument("--list", metavar="PATH", help="print each finding below PATH")
    arguments = parser.parse_args()
    if arguments.list:
        for file in read_files((arguments.list,)):
            for finding in find_all(*file):
                print(finding)
        return 0
    findings, tokens = count_by_folder()
    if arguments.write:
        text = {"findings": findings, "tokens": dict(sorted(tokens.items()))}
        COUNTS.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        return 0
    grown = compare(findings, json.loads(COUNTS.read_text(encoding="utf-8"))["findings"])
    for line in grown:
        print(line)
    if grown:
        folder = grown[0].partition(":")[0]
        print(f"list them with: scripts/check_style.py --list {folder}", file=sys.stderr)
    totals = {top: sum(n for f, n in tokens.items() if f.split("/")[0] == top) for top in CHECKED}
    print("tokens:", ", ".join(f"{top} {count}" for top, count in totals.items()))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
