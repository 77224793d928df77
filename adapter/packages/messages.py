"""Words the faults of packages: the place, what to do, and what is wrong, at lengths that fit.

Every InvalidModel of a package is made here.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from adapter.errors import InvalidModel

_MAX_CHARACTERS = 100
_MAX_LISTED = 10


def invalid_model(place: object, fault: str, *, remedy: str = "") -> InvalidModel:
    """Return the error for a fault of a package. The text begins with the place, a file or
    something within it; the remedy, if there is one, comes before the fault.
    """
    advice = f"{remedy}; " if remedy else ""
    return InvalidModel(f"{shown(place)}: {advice}{fault}")


def refuse_faults(place: object, faults: Iterable[str]) -> None:
    """Raise InvalidModel for the first of the faults that a place has; return if there is none."""
    for fault in faults:
        raise invalid_model(place, fault)


def shown(*path: object) -> str:
    """Return a path, or the parts of one, as text, whatever bytes the names consist of."""
    text = "/".join(map(str, path))
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # no path: JSON may hold any half of a surrogate pair
        return text.encode("utf-8", "backslashreplace").decode()


def cut(text: str, max_characters: int = _MAX_CHARACTERS) -> str:
    """Return the first characters of a text that a caller wrote, and dots for the rest."""
    return text if len(text) <= max_characters else text[:max_characters] + "..."


def listed(items: Iterable[object], separator: str = ", ") -> str:
    """Return at most ten of the items as text, and how many more there are."""
    texts = [shown(item) for item in items]
    more = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return (separator.join(texts[:_MAX_LISTED]) or "nothing") + more


def quoted_list(names: Iterable[str], separator: str = ", ") -> str:
    """Return `listed` of the names in quotes."""
    return listed((repr(cut(name)) for name in names), separator)


def did_you_mean(names: Iterable[str], known: Iterable[str]) -> str:
    """Propose known names for misspelt ones, as the end of a message; nothing if none is near."""
    near = [one for name in names for one in get_close_matches(name[:_MAX_CHARACTERS], known, 1)]
    return f"; did you mean {', '.join(near)}?" if near else ""
