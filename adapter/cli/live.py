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


def watch(read_lines: Callable[[], Lines], seconds: float, *, is_view: bool) -> int:
    """Show the lines again and again until Ctrl-C, and return the exit code.

    A view is refreshed in place on a terminal, and followed by an empty line elsewhere.
    """
    try:
        if is_view and is_live(sys.stdout):
            _refresh(read_lines, seconds)
        while True:
            lines = [*read_lines(), ""] if is_view else read_lines()
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0


def _refresh(read_lines: Callable[[], Lines], seconds: float) -> None:
    """Write each view over the one before, until Ctrl-C."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as view:
        while True:
            view.update(fit_lines(read_lines(), console), refresh=True)
            time.sleep(seconds)


def fit_lines(lines: Lines, console: "Console") -> "Text":
    """Cut a view to the lines of the terminal."""
    from rich.text import Text  # noqa: PLC0415 - see above

    height = console.height - 1
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    return Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis")


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done. The caller reports each news to the yielded function."""
    if is_live(sys.stderr):
        from rich.console import Console  # noqa: PLC0415 - see above

        console = Console(stderr=True, highlight=False)
        started_at = time.monotonic()
        with console.status(escape_markup(title)) as status:
            yield lambda news: status.update(
                escape_markup(f"{_join_news(title, news)} ({time.monotonic() - started_at:.0f} s)")
            )
    else:
        yield _PlainProgress(title).report


def _join_news(title: str, news: str) -> str:
    return f"{title}: {news}" if news else title


def escape_markup(text: str) -> str:
    """Escape what the terminal or rich would take for a command."""
    from rich.markup import escape  # noqa: PLC0415 - see above

    return escape(printable(text))


class _PlainProgress:
    """Prints a line whenever the news change, unless the operation ends soon."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started_at = time.monotonic()
        self._reported = ""

    def report(self, news: str) -> None:
        """Print the news, if they are new."""
        is_slow = time.monotonic() - self._started_at >= _SILENT_SECONDS
        if is_slow and news not in {"", self._reported}:
            self._reported = news
            print(printable(f"{self._title}: {news}"), file=sys.stderr, flush=True)
