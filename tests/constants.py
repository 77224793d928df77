"""Gives constants of the adapter other values, for tests that cannot wait as long as a pod can.

`RunningAdapter(constants={HANG: 1})` does so in the process that it starts. No setting changes.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping

VARIABLE = "CONSTANTS_OF_TESTS"
# An unload without progress has lost its process; the one that is tried then has as long. Triton
# takes 1.2 s for each process of a model that is well, so 1 s is too short for both.
HANG = "adapter.core.times.HANG_SECONDS"
UNLOAD = "adapter.app.parts.UNLOAD_SECONDS"
LOAD_WAIT = "adapter.app.listeners.LOAD_WAIT_SECONDS"
STAY = "adapter.core.times.TURN_SECONDS"
# an embedded Triton that answers nothing for so long is restarted
TRITON_HANG = "adapter.triton.liveness.HANG_SECONDS"
STORE = "adapter.app.parts.STORE_SECONDS"
MOST_CONNECTIONS = "adapter.frontends.http.server.MOST_CONNECTIONS"
FEWEST_CONNECTIONS = "adapter.frontends.http.server.FEWEST_CONNECTIONS"
ADMIN_BODY = "adapter.frontends.admin.pages.BODY_SECONDS"
NEVER = 3600.0


def as_variable(constants: Mapping[str, float]) -> dict[str, str]:
    return {VARIABLE: json.dumps(dict(constants))} if constants else {}


def set_constants() -> None:
    """Set those of the environment, which then no longer has them."""
    for path, value in json.loads(os.environ.pop(VARIABLE, "{}")).items():
        module, _, name = path.rpartition(".")
        holder = importlib.import_module(module)
        assert hasattr(holder, name), path
        setattr(holder, name, value)


if __name__ == "__main__":
    set_constants()
    sys.exit(importlib.import_module("adapter.__main__").main())
