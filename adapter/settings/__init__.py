"""Every setting, where its value came from, and all that is wrong with them at once.

A value given by a flag beats one from the environment, that beats the file, that beats the names
inherited from SageMaker and ModelMesh, and those beat the defaults. One name, three spellings:
`--load-timeout-seconds`, `ADAPTER_LOAD_TIMEOUT_SECONDS`, `load_timeout_seconds:`.
"""

from adapter.settings.model import Settings
from adapter.settings.naming import flag_of, variable_of
from adapter.settings.shown import as_text, for_programs, masked
from adapter.settings.sources import CONFIG_VARIABLE, Loaded, like_flag, load_settings
from adapter.settings.values import Address, Reserve, parse_address

__all__ = [
    "CONFIG_VARIABLE",
    "Address",
    "Loaded",
    "Reserve",
    "Settings",
    "as_text",
    "flag_of",
    "for_programs",
    "like_flag",
    "load_settings",
    "masked",
    "parse_address",
    "variable_of",
]
