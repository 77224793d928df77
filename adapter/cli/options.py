"""Adds options that several commands share: the settings, and where a running adapter is."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapter.settings import Loaded


TOKEN_HINT = "set ADAPTER_CONTROL_TOKEN to it, or to file:PATH"  # noqa: S105


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the file of settings, and a flag for each setting.

    The values stay text: load_settings finds what is wrong with them, all at once.
    """
    from adapter.settings import (  # noqa: PLC0415 - pydantic
        GROUPS,
        SECRETS,
        Settings,
        flag_of,
        help_of,
        metavar_of,
    )

    _add_config_file(parser)
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name in SECRETS:
                continue
            field = Settings.model_fields[name]
            text = help_of(name).replace("%", "%%")
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


def _add_config_file(parser: "argparse._ActionsContainer") -> None:
    """Add the flag that names the file of settings."""
    text = "YAML file of settings (or ADAPTER_CONFIG)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)


def add_listeners(parser: argparse.ArgumentParser, *names: str, path: str = "") -> None:
    """Add the options that say where a running adapter is: --url, the settings, and listeners.

    The help names the first listener as the default, for a probe with its `path`.
    """
    group = parser.add_argument_group("where the adapter is")
    place = f"{path} at the listener" if path else "the listener"
    text = f"http://HOST:PORT[/PATH] or unix:/SOCKET (default: {place} `{names[0]}`)"
    group.add_argument("--url", metavar="URL", help=text)
    _add_config_file(group)
    for name in names:
        text = f"the listener `{name}`, as given to serve (or ADAPTER_{name.upper()})"
        group.add_argument(f"--{name}", metavar="HOST:PORT", help=text)


def read_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> "Loaded":
    """Merge the settings of flags, environment and file. Raises InvalidSettings."""
    from adapter.settings import Settings, load_settings  # noqa: PLC0415 - pydantic

    values = vars(args)
    flags = {name: values[name] for name in Settings.model_fields if values.get(name) is not None}
    return load_settings(flags, environ, args.config)


def control_headers(args: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the header with the control token, or none if no token is set.

    Raises InvalidSettings.
    """
    token = read_settings(args, environ).settings.control_token
    return {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}


def parse_seconds(text: str) -> float:
    """Parse a number of seconds above 0. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
