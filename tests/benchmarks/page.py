"""Writes docs/benchmarks.md from the results and the words of notes.toml."""

from collections.abc import Iterable, Mapping, Sequence

from tests.benchmarks.rows import MEASURES, ROWS, Json, Row, number, verdict

_HEAD = """\
# Benchmarks

<!-- written by `make bench`: words are in tests/benchmarks/notes.toml -->

`make bench` measures all of this anew on the machine it runs on and writes this page and
[benchmarks.json](benchmarks.json). What is compared is measured in turn, a round of each and then
the next, so that what else the machine does meets all. A figure is the median of its rounds, with
the least and the greatest in brackets. A target is **met** when the worst of at least three rounds
meets it, **missed** when the best one misses it; else it is **not settled**. Each figure carries
the commit and the date at which it was measured. Once the code that it measures has changed it is
**of older code** and says nothing of this one.

The load tester ([bench.md](bench.md)) is a process of its own and shares the cores with adapter,
Triton and the model's python process. The model is `examples/models/identity` on Triton's python
backend. The copying proxy (`tests/benchmarks/copying.py`) copies bytes on the adapter's event loop
and reads nothing: no proxy in Python does less. CPU is user and system time of all threads of the
one process.
"""

_COLUMNS = ("what", "target", "measured", "", "at")


def page(
    measures: Json, notes: Mapping[str, str], elsewhere: Mapping[str, Json] | None = None
) -> str:
    """`measures` is what benchmarks.json holds, with `is_stale` in each; `elsewhere` the same of
    other machines, by what is special about them.
    """
    sections = (_section(name, measures.get(name), notes) for name in MEASURES)
    others = (_elsewhere(what, found) for what, found in (elsewhere or {}).items())
    return "\n".join([_HEAD, *sections, *others])


def _elsewhere(what: str, measures: Json) -> str:
    """One table, and no row that was not measured there."""
    rows = [
        [f"{MEASURES[row.measure][0]}: {row.what}", *_cells(row, measures[row.measure])[1:]]
        for row in sorted(ROWS, key=lambda row: list(MEASURES).index(row.measure))
        if row.figure in measures.get(row.measure, {"figures": {}})["figures"]
    ]
    parts = [f"## On a machine with {what}\n", table(_COLUMNS, rows)]
    return "\n".join([*parts, _machine(next(iter(measures.values())))])


def _section(name: str, measure: Json | None, notes: Mapping[str, str]) -> str:
    title, _ = MEASURES[name]
    parts = [f"## {title}\n"]
    if name in notes:
        parts.append(notes[name].strip() + "\n")
    rows = [row for row in ROWS if row.measure == name]
    parts.append(table(_COLUMNS, (_cells(r, measure) for r in rows)))
    if measure is not None:
        parts.append(_machine(measure))
        missed = [row for row in rows if row.key in notes and _said(row, measure)[1] == "missed"]
        parts += [f"- **{row.what}**: {notes[row.key].strip()}\n" for row in missed]
    return "\n".join(parts)


def _cells(row: Row, measure: Json | None) -> list[str]:
    said, judged = _said(row, measure)
    at = f"{measure['commit']}, {measure['date']}" if measure is not None else ""
    return [row.what, row.target, said, judged, at]


def _said(row: Row, measure: Json | None) -> tuple[str, str]:
    """What was measured, and what that is worth."""
    found = measure["figures"].get(row.figure) if measure is not None else None
    if measure is None or found is None:
        return "not measured on this code", ""
    if measure["is_stale"]:
        return shown(found, row.unit), "of older code"
    return shown(found, row.unit), "coarse" if measure["quick"] else verdict(row, found)


def _machine(measure: Json) -> str:
    about = measure["machine"]
    memory = number(about["memory_bytes"] / 2**30, "GiB")
    return (
        f"{about['cpu']}, {about['cores']} cores ({measure['busy']:.0%} busy with other work before"
        f" it began), {memory}, Linux {about['kernel']}, {', '.join(about['versions'])}.\n"
    )


def shown(spread: Json, unit: str) -> str:
    """`12.3 ms (11 to 14)`: the median, and the rounds around it."""
    low, high = (number(spread[each], "") for each in ("min", "max"))
    text = number(spread["median"], unit)
    return f"{text} (one round)" if spread["rounds"] == 1 else f"{text} ({low} to {high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
