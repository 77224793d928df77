"""Writes the tables of what was simulated into docs/measurements.md."""

from collections.abc import Iterable, Sequence

from scripts.simulation.study import Json

_BEGIN = "<!-- simulated: {} -->\n"
_END = "<!-- end -->\n"
_FACTORS = (0, 200, 300, 500)  # of the balance


def with_tables(page: str, found: Json) -> str:
    """Return the page with what is between its markers written anew."""
    for name, lines in (
        ("balance", _balance(found["balance"])),
        ("shares", _shares(found["shares"])),
    ):
        before, _, rest = page.partition(_BEGIN.format(name))
        _, _, after = rest.partition(_END)
        page = before + _BEGIN.format(name) + "\n" + "".join(lines) + "\n" + _END + after
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |\n" for line in lines]


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _factor(factor: int) -> str:
    return str(factor) if factor else "none"


def _balance(rows: Sequence[Json]) -> list[str]:
    """Some rows: the plot and fleet-simulation.json have all."""
    head = ["calls", "factor", "in memory", "on another machine than its own", "fetched a call"]
    head += ["half of the calls took", "99 % took"]
    return _table(
        head,
        [
            [
                row["load"],
                _factor(row["factor"]),
                _percent(row["hits"]),
                _percent(row["away"]),
                f"{row['fetched_mib_per_call']:.0f} MiB",
                f"{row['p50_seconds']:.2f} s",
                f"{row['p99_seconds']:.1f} s",
            ]
            for row in rows
            if row["load"].startswith("400 ") and row["factor"] in _FACTORS
        ],
    )


def _shares(rows: Sequence[Json]) -> list[str]:
    return _table(
        ["models", "machines", "the most on a machine, on average", "in 19 of 20 lists at most"],
        [
            [
                f"{row['models']:,}",
                str(row["machines"]),
                f"{row['most']:.2f} x the mean",
                f"{row['most_of_95_percent']:.2f} x",
            ]
            for row in rows
        ],
    )
