"""Changes the terminal in place: a view that refreshes, and the progress of a load."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adapter.cli.text import is_live, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Lines = Sequence[str]
_SILENT_SECONDS = 2.0  # before the first line of progress where lines cannot be written over


def watch(look: Callable[[], Lines], seconds: float, *, is_view: bool) -> int:
    """Show what `look` returns, again and again, until Ctrl-C. A view is refreshed in place on a
    terminal, and has an empty line behind it elsewhere.
    """
    try:
        if is_view and is_live(sys.stdout):
            _refresh(look, seconds)
        while True:
            lines = [*look(), ""] if is_view else look()
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0


def _refresh(look: Callable[[], Lines], seconds: float) -> None:
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as view:
        while True:
            view.update(_fitting(look(), console), refresh=True)
            time.sleep(seconds)


def _fitting(lines: Lines, console: "Console") -> "Text":
    from rich.text import Text  # noqa: PLC0415 - see above

    height = console.height - 1
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    return Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis")


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done; what is yielded takes the latest news of it."""
    if is_live(sys.stderr):
        from rich.console import Console  # noqa: PLC0415 - see above

        console = Console(stderr=True, highlight=False)
        begun = time.monotonic()
        with console.status(_escaped(title)) as status:
            yield lambda news: status.update(
                _escaped(f"{_sentence(title, news)} ({time.monotonic() - begun:.0f} s)")
            )
    else:
        yield _Plain(title).tell


def _sentence(title: str, news: str) -> str:
    return f"{title}: {news}" if news else title


def _escaped(text: str) -> str:
    from rich.markup import escape  # noqa: PLC0415 - see above

    return escape(printable(text))


class _Plain:
    """Prints a line when the news change, and none for what is done soon."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun = time.monotonic()
        self._told = ""

    def tell(self, news: str) -> None:
        if news not in {"", self._told} and time.monotonic() - self._begun >= _SILENT_SECONDS:
            self._told = news
            print(printable(f"{self._title}: {news}"), file=sys.stderr, flush=True)
