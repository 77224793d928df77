"""Finds which model of a package with several answers the caller, and what the others are to it.

Triton loads the steps of an ensemble along with it, but never what Python code calls by name: such
helpers have to be loaded one by one.
"""

import graphlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adapter.packages.messages import cut, invalid_model, quoted_list

# No branch gives anything back, and a string that is never closed ends with its line or the file:
# each character is read a fixed number of times.
# Names of folders as paths have them; of no pattern a match can begin twice at one character.
_BEFORE_SLASH = re.compile(r"""["'/]([^"'/\\\n]{1,255})(?=/)""")
_BEHIND_SLASH = re.compile(r"""/\s{0,8}["']([^"'/\\\n]{1,255})["']""")
_JOINED = re.compile(r""",\s{0,8}["']([^"'/\\\n]{1,255})["'](?=\s{0,8}[,)])""")
# The parameter by which a config declares its model to be the package's entry.
ENTRY_PARAMETER = "adapter_entry"
_QUOTED = re.compile(
    r"""
      \#[^\n]*+
    | \"{3} ( [^"\\]*+ (?: (?: \\. | "(?!"") ) [^"\\]*+ )*+ ) (?: \"{3} )?+
    | '{3}  ( [^'\\]*+ (?: (?: \\. | '(?!'') ) [^'\\]*+ )*+ ) (?: '{3} )?+
    | "     ( [^"\\\n]*+ (?: \\. [^"\\\n]*+ )*+ ) "?+
    | '     ( [^'\\\n]*+ (?: \\. [^'\\\n]*+ )*+ ) '?+
    """,
    re.VERBOSE | re.DOTALL,
)

_Graph = Mapping[str, Collection[str]]


@dataclass(frozen=True, slots=True)
class Member:
    """Describes one model of a package, as far as roles depend on it."""

    name: str
    is_ensemble: bool
    steps: tuple[str, ...]  # models of its ensemble steps
    mentions: frozenset[str]  # names of other members that its Python code has as string literals
    is_entry: bool = False  # its config declares it to be the package's entry
    has_calls: bool = False  # its Python code calls models


@dataclass(frozen=True, slots=True)
class Plan:
    """The roles of a package's models; steps and helpers each come after those they refer to."""

    entry: str
    steps: tuple[str, ...]  # reached from the entry through ensembles
    helpers: tuple[str, ...]  # members that are neither entry nor steps


def plan(members: Sequence[Member], hint: str | None, where: str) -> Plan:
    """Return the roles of a package's models. Raise InvalidModel if the entry is uncertain, a step
    is missing or ensembles form a circle.

    `hint` is the caller's word for the entry, `where` the path that messages name.
    """
    by_name = {member.name: member for member in members}
    steps = {name: by_name[name].steps for name in sorted(by_name)}
    _check_steps(steps, where)
    references = {name: {*steps[name], *by_name[name].mentions} - {name} for name in steps}
    entry = _choose_entry(by_name, references, hint, where)
    reached = _sort_postorder([entry], steps, set())[:-1]
    others = by_name.keys() - {entry, *reached}
    within = {name: references[name] & others for name in others}
    return Plan(entry, tuple(reached), tuple(_sort_referred_first(within)))


def mentioned(source: str, names: Collection[str]) -> frozenset[str]:
    """Return those of `names` that occur as string literals in Python source.

    The text is searched for quoted strings and not parsed: for that Python stops all threads, for
    seconds where the source is made for it. A name that is put together, of several literals or at
    run time, or written with escapes is not found.
    """
    wanted = frozenset(names)
    strings = _QUOTED.finditer(source)
    return wanted.intersection(match[match.lastindex] for match in strings if match.lastindex)


def names_in_paths(source: str) -> frozenset[str]:
    """Return the names of folders in the paths that Python source has, as in `"painter/1"`,
    `parent / "painter"` and `join(parent, "painter", "1")`.
    """
    names = {match[1] for match in _BEFORE_SLASH.finditer(source)}
    names |= {match[1] for match in _BEHIND_SLASH.finditer(source)}
    if "join(" in source:
        names |= {match[1] for match in _JOINED.finditer(source)}
    return frozenset(names)


def _check_steps(steps: _Graph, where: str) -> None:
    """Raise InvalidModel if a step is not in the package, or ensembles are steps of each other."""
    for name, needed in steps.items():
        for step in needed:
            if step not in steps:
                raise invalid_model(
                    where,
                    f"ensemble {cut(name)!r} has the step {cut(step)!r}, which is not in the"
                    f" package; it holds {quoted_list(steps)}",
                )
    try:
        graphlib.TopologicalSorter(steps).prepare()
    except graphlib.CycleError as error:
        circle = quoted_list(reversed(error.args[1]), " -> ")
        raise invalid_model(where, f"ensembles form a circle: {circle}") from error


def _choose_entry(
    members: Mapping[str, Member], references: _Graph, hint: str | None, where: str
) -> str:
    """Return the name of the model that answers the caller: the caller's hint, else the one that
    declares itself, else the only one that can be meant. Raise InvalidModel if there is none.
    `references` has the models that each model refers to.
    """
    if hint is not None and hint not in members:
        fault = f"the entry {cut(hint)!r} is not in the package; it holds {quoted_list(members)}"
        raise invalid_model(where, fault)
    if hint is not None:
        return hint
    declared = [name for name, member in members.items() if member.is_entry]
    if len(declared) > 1:
        remedy = f"set the parameter {ENTRY_PARAMETER} in one config.pbtxt"
        raise invalid_model(where, f"{quoted_list(declared)} have it", remedy=remedy)
    if declared:
        return declared[0]
    referred = {name for needed in references.values() for name in needed}
    free = [name for name in references if name not in referred]
    ensembles = [name for name in free if members[name].is_ensemble]
    # code may make the names that it calls, and so refer to models unseen
    callers = [name for name in free if members[name].has_calls]
    for candidates in (ensembles, free, callers):
        if len(candidates) == 1:
            return candidates[0]
    raise invalid_model(
        where,
        f"any of {quoted_list(free or references)} may be meant",
        remedy=f"set the parameter {ENTRY_PARAMETER} in the config.pbtxt of the model that answers,"
        ' or name it as "entry" in the load request',
    )


def _sort_referred_first(references: _Graph) -> list[str]:
    """Return the names, each after those that it refers to; the members of a circle side by side,
    by name.

    Kosaraju's algorithm: no recursion, and linear in what is given.
    """
    referrers: dict[str, list[str]] = {name: [] for name in sorted(references)}
    for name in referrers:
        for other in references[name]:
            referrers[other].append(name)
    seen: set[str] = set()
    result: list[str] = []
    for name in reversed(_sort_postorder(sorted(references, reverse=True), referrers, set())):
        result += sorted(_sort_postorder([name], references, seen))
    return result


def _sort_postorder(roots: Iterable[str], graph: _Graph, seen: set[str]) -> list[str]:
    """Return the nodes of a graph that the roots reach and `seen` does not have yet, each after
    those that it leads to; add them to `seen`.
    """
    result: list[str] = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(graph[root]))]
        while path:
            name, ahead = path[-1]
            following = next((other for other in ahead if other not in seen), None)
            if following is None:
                result.append(name)
                path.pop()
            else:
                seen.add(following)
                path.append((following, iter(graph[following])))
    return result
