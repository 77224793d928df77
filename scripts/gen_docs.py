"""Write the reference pages of docs/ from the code, or with --check say which are stale."""

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from adapter.log import EVENTS
from adapter.settings import Settings, as_text, flag_of, variable_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
WRITTEN_BY = "<!-- written by scripts/gen_docs.py: change the code, then run it -->\n\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def settings_page() -> str:
    rows = [
        [
            f"`{name}`",
            f"`{flag_of(name)}`",
            f"`{variable_of(name)}`",
            as_text(name, field.default),
            str(field.description),
        ]
        for name, field in Settings.model_fields.items()
    ]
    return (
        "# Settings\n\n"
        "A flag beats the environment, that beats the file (`--config FILE` or `ADAPTER_CONFIG`: "
        "YAML, keys as in the first column), that beats the inherited names below, and those beat "
        "the defaults. `triton-adapter check-config` prints every value and where it came from. "
        "An empty variable counts as not given; an unknown `ADAPTER_` variable or key is an "
        "error.\n\n"
        "Sizes are bytes or a number with KiB, MiB, GiB or TiB. Flags of settings that take "
        "several values are given once for each; in the file they are lists.\n\n"
        + table(["setting", "flag", "environment", "default", "meaning"], rows)
        + "\n## Inherited names\n\n"
        + table(["variable", "sets"], INHERITED)
    )


INHERITED = [
    ["`SAGEMAKER_BIND_TO_PORT`", "the port of `http`"],
    [
        "`SAGEMAKER_TRITON_DEFAULT_MODEL_NAME`",
        "`single_model`: that folder of /opt/ml/model, unless `SAGEMAKER_MULTI_MODEL` is `true`",
    ],
    ["`SAGEMAKER_MULTI_MODEL`", "`false` alone: `single_model` is /opt/ml/model"],
    ["`RUNTIME_PORT`", "the port of `triton_grpc`"],
    ["`ADAPTER_PORT`", "nothing: ignored with a warning, this version has no gRPC door"],
]


def events_page() -> str:
    rows = [[f"`{name}`", meaning] for name, meaning in sorted(EVENTS.items())]
    return (
        "# Events\n\n"
        "What the log says, one event a line on stdout. `log_format` chooses JSON, with `time`, "
        "`level`, `logger`, `event` and the event's own fields, or text.\n\n"
        + table(["event", "meaning"], rows)
    )


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "events.md": events_page,
}


def stale(name: str, wanted: str) -> str:
    """A diff from the file to what it should be; empty when they are the same."""
    path = DOCS / name
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = found.splitlines(keepends=True), wanted.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, f"docs/{name}", "as it should be"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    is_check = parser.parse_args().check
    pages = {name: WRITTEN_BY + page() for name, page in PAGES.items()}
    diffs = [diff for name, text in pages.items() if (diff := stale(name, text))]
    if is_check:
        print("".join(diffs), end="")
        return 1 if diffs else 0
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
