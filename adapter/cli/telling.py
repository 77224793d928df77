"""Prints the demo's steps: a title, a line for each that did what it says, or why it did not."""

import textwrap

from adapter.cli.text import BOLD, GREEN, RED, coloured, width

PLAIN_COLUMNS = 100  # where there is no terminal
_LEAST_COLUMNS = 30


class StepFailed(Exception):
    pass


def title(text: str) -> None:
    print(f"\n{coloured(_wrapped(text, ''), BOLD)}", flush=True)


def say(text: str) -> None:
    print(_wrapped(text, "  "), flush=True)


def _wrapped(text: str, indent: str) -> str:
    """Break each line at words, on a terminal that is too narrow for it. Codes of colours, which
    take no columns, are counted: such a line breaks somewhat early.
    """
    columns = width()
    if columns is None:
        return indent + text
    wrapper = textwrap.TextWrapper(
        max(columns, _LEAST_COLUMNS),
        initial_indent=indent,
        subsequent_indent=indent + " " * 6,
        break_long_words=False,
    )
    lines = [
        wrapper.fill(line) if len(indent + line) > columns else indent + line
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def detail(text: str) -> None:
    print(f"        {text}", flush=True)


def check(is_met: bool, text: str, more: str = "") -> None:
    say(f"{coloured('ok', GREEN)}    {text}" if is_met else f"{coloured('FAIL', RED)}  {text}")
    if not is_met:
        say(more)
        raise StepFailed(text)
