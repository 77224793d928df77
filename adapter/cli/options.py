"""Options that several commands share: the settings, and where a running adapter is."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapter.settings import Loaded


TOKEN_HINT = "set ADAPTER_CONTROL_TOKEN, or name its file by --control-token-file"  # noqa: S105
# Variables that name the token of a control call, or where it is.
_OF_TOKEN = ("ADAPTER_CONTROL_TOKEN", "ADAPTER_CONTROL_TOKEN_FILE", "ADAPTER_CONFIG")


def examples_folder() -> Path:
    """Return where the example models are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_examples"
    return installed if installed.is_dir() else package.parent / "examples" / "models"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the file of settings."""
    text = "YAML file of settings (or ADAPTER_CONFIG)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting. Values stay text: load_settings finds all their faults."""
    from adapter.settings import (  # noqa: PLC0415 - pydantic
        GROUPS,
        SECRETS,
        Settings,
        flag_of,
        help_of,
        metavar_of,
    )

    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name in SECRETS:
                continue
            field, text = Settings.model_fields[name], help_of(name).replace("%", "%%")
            if field.annotation is bool:
                action = argparse.BooleanOptionalAction
                group.add_argument(flag_of(name), action=action, default=None, help=text)
            else:
                is_list = isinstance(field.default, tuple)
                group.add_argument(
                    flag_of(name),
                    action="append" if is_list else "store",
                    metavar=metavar_of(name),
                    help=f"{text}; repeatable" if is_list else text,
                )


def add_listeners(parser: argparse.ArgumentParser, *names: str, path: str = "") -> None:
    """Add --url, and the flags of these listeners, to say where the adapter is as it is said to
    `serve`. The first of them is the default, for a probe with this `path`.
    """
    group = parser.add_argument_group("where the adapter is")
    place = f"{path} at the listener" if path else "the listener"
    url = "http://HOST:PORT[/PATH]" if path else "http://HOST:PORT"
    text = f"{url} or unix:/SOCKET (default: {place} `{names[0]}`)"
    group.add_argument("--url", metavar="URL", help=text)
    add_config(group)  # type: ignore[arg-type]
    for name in names:
        text = f"the listener `{name}`, as given to serve (or ADAPTER_{name.upper()})"
        group.add_argument(f"--{name}", metavar="HOST:PORT", help=text)


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the file of the control token."""
    text = "the file with the adapter's control_token (or ADAPTER_CONTROL_TOKEN, the token itself)"
    parser.add_argument("--control-token-file", metavar="FILE", help=text)


def control_headers(args: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the header that names the token, if there is one. No other setting need be right.

    Raises InvalidSettings.
    """
    given = {name: environ[name] for name in _OF_TOKEN if environ.get(name)}
    if not (given or args.config or args.control_token_file):
        return {}
    from adapter.settings import load_settings  # noqa: PLC0415 - pydantic

    flag = {"control_token_file": args.control_token_file}
    token = load_settings(flag, given, args.config).settings.control_token
    return {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}


def flags(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that were given as flags."""
    from adapter.settings import Settings  # noqa: PLC0415 - pydantic

    given = vars(args)
    return {name: given[name] for name in Settings.model_fields if given.get(name) is not None}


def load(args: argparse.Namespace, environ: Mapping[str, str]) -> "Loaded":
    """Load the settings of flags, environment and file. Raises InvalidSettings."""
    from adapter.settings import load_settings  # noqa: PLC0415 - pydantic

    return load_settings(flags(args), environ, args.config)


def positive(text: str) -> float:
    """Parse a number of seconds above 0. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
