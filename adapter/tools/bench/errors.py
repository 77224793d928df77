"""Errors that end a run, and how text of others is printed."""

from importlib import import_module
from typing import Any


class BenchError(Exception):
    """Nothing can be measured: nobody answers, or what is measured lacks something."""


class BadArguments(BenchError):
    """Each of `problems` says what is wrong with an argument, or with what is installed for it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def needed(module: str) -> Any:
    """Import a library of the extra `bench`; raise BadArguments, which names it, without."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise BadArguments(
            [f"{name} is not installed; in a clone: pip install '.[bench]'"]
        ) from error


def printable(text: str) -> str:
    """Escape what would move the cursor or break the line: servers may send any character."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
