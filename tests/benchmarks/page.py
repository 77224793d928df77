"""Writes the benchmarks of docs/measurements.md from the results and the words of notes.toml."""

from collections.abc import Iterable, Mapping, Sequence

from tests.benchmarks.rows import MEASURES, ROWS, Json, Row, number, verdict

BEGIN, END = "<!-- benchmarks: written by `make bench` -->\n", "<!-- end of benchmarks -->\n"

_COLUMNS = ("what", "target", "measured")


def with_benchmarks(text: str, benchmarks: str) -> str:
    """Return the page with these benchmarks in place of those that it has."""
    return replace_between(text, BEGIN, END, f"\n{benchmarks}\n")


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with another text between two marks."""
    assert begin in page, f"the page lacks {begin}"
    assert end in page, f"the page lacks {end}"
    before, _, rest = page.partition(begin)
    return before + begin + text + end + rest.partition(end)[2]


def page(measures: Json, notes: Mapping[str, str]) -> str:
    """Return the section of each measure, from the results of benchmarks.json marked if stale."""
    return "\n".join(_section(name, measures.get(name), notes) for name in MEASURES)


def _section(name: str, measure: Json | None, notes: Mapping[str, str]) -> str:
    title, _ = MEASURES[name]
    parts = [f"### {title}\n"]
    if name in notes:
        parts.append(notes[name].strip() + "\n")
    rows = [row for row in ROWS if row.measure == name]
    measured = [row for row in rows if measure is not None and row.figure in measure["figures"]]
    if measured:
        assert measure is not None
        parts.append(table(_COLUMNS, (_cells(row, measure) for row in measured)))
    if missing := len(rows) - len(measured):
        parts.append(f"Figures that are not measured on this code: {missing}.\n")
    if measure is not None:
        parts.append(_origin(measure))
        missed = [
            row for row in measured if row.key in notes and _describe(row, measure)[1] == "missed"
        ]
        parts += [f"- **{row.what}**: {notes[row.key].strip()}\n" for row in missed]
    return "\n".join(parts)


def _cells(row: Row, measure: Json) -> list[str]:
    return [row.what, row.target, ": ".join(filter(None, _describe(row, measure)))]


def _describe(row: Row, measure: Json) -> tuple[str, str]:
    """Return the figure of a row, and what it is worth against the target."""
    found = measure["figures"][row.figure]
    if measure["is_stale"]:
        return shown(found, row.unit), ""
    return shown(found, row.unit), "coarse" if measure["quick"] else verdict(row, found)


def _origin(measure: Json) -> str:
    """Commit, date and cores, and whether the code has changed since."""
    age = " (older code)" if measure["is_stale"] else ""
    cores = measure["machine"]["cores"]
    return f"Commit {measure['commit']}{age}, {measure['date']}, {cores} cores.\n"


def shown(spread: Json, unit: str) -> str:
    """`12.3 ms (11 to 14)`: the median, and the rounds around it."""
    low, high = (number(spread[each], "") for each in ("min", "max"))
    text = number(spread["median"], unit)
    return f"{text} (one round)" if spread["rounds"] == 1 else f"{text} ({low} to {high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
