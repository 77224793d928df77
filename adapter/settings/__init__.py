"""Loads the settings: every value, its origin, and all problems at once.

A flag beats the environment, that beats the file, that beats the names inherited from SageMaker
and ModelMesh, and those beat the defaults. One name, three spellings:
`--load-timeout-seconds`, `ADAPTER_LOAD_TIMEOUT_SECONDS`, `load_timeout_seconds:`.
"""

from adapter.settings.model import GROUPS, SECRETS, Settings, metavar_of
from adapter.settings.sources import (
    Loaded,
    as_text,
    file_schema,
    for_people,
    for_programs,
    help_of,
    load_settings,
)
from adapter.settings.values import (
    Address,
    Reserve,
    flag_of,
    parse_address,
    parse_endpoint_key,
    secret_variables,
    variable_of,
)

__all__ = [
    "GROUPS",
    "SECRETS",
    "Address",
    "Loaded",
    "Reserve",
    "Settings",
    "as_text",
    "file_schema",
    "flag_of",
    "for_people",
    "for_programs",
    "help_of",
    "load_settings",
    "metavar_of",
    "parse_address",
    "parse_endpoint_key",
    "secret_variables",
    "variable_of",
]
