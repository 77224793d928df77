"""Mutations: mistakes in one file each, made in a copy of the code."""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Mutation = dict[str, Any]


def mutations_of(name: str) -> list[Mutation]:
    """Return the mutations of a file in this folder."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    found: list[Mutation] = tomllib.loads(text)["mutant"]
    return found


def id_of(mutation: Mutation) -> str:
    return str(mutation["name"]).replace(" ", "-")


@contextmanager
def mutated(copy: Path, mutation: Mutation) -> Iterator[None]:
    """Make the mistake in the copy, and take it back."""
    file = copy / mutation["file"]
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation["was"]) == 1, "the code has changed: write the mutation anew"
    file.write_text(text.replace(mutation["was"], mutation["becomes"]), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")


def environment_of(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
