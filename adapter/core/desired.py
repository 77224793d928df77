"""Why a model is to be loaded, what follows from that, and how far a desired model is.

One loop (control/desired.py) acts on all reasons; a Reason holds what differs between them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    GivenUp,
    InvalidModel,
    InvalidRequest,
    LoadFailed,
    ModelTooLarge,
)

_AT_ONCE = 4  # as many loads as Triton runs by default
_PAUSE_SECONDS = 2.0
# How long calls do not load a model of a store that was given up.
CALLS_REFUSED_SECONDS = 600.0
# Errors of the files themselves: nothing but another version fixes them.
OF_THE_FILES = (InvalidModel, LoadFailed, ModelTooLarge)


@dataclass(frozen=True, slots=True)
class Reason:
    """`at_once`: how many loads may run, without those that hang in Triton.

    `turn_seconds`: how long one waits for a Triton that is away, and for its trial as a suspect of
    ending Triton. `given_up_seconds`: how long none is begun of a model that was given up.
    `keeps`: a load that failed is tried again, after `pause_seconds`, doubled up to a minute, but
    not after the errors `refused_by`; if not, the failure is answered to those who wait.
    """

    name: str
    at_once: int
    turn_seconds: float = math.inf
    given_up_seconds: float = math.inf
    keeps: bool = True
    pause_seconds: float = _PAUSE_SECONDS
    refused_by: tuple[type[AdapterError], ...] = (GivenUp,)


START = Reason("load_at_start", _AT_ONCE)
PRELOAD = Reason("preload", _AT_ONCE, refused_by=(ArtifactNotFound, InvalidRequest, *OF_THE_FILES))


class Want(Enum):
    WAITING = "waiting"  # its load was not tried yet, or is under way
    FAILED = "failed"  # it is tried again
    REFUSED = "refused"  # it is not tried again until Triton is restarted
    LOADED = "loaded"  # its load has ended well; it may have been evicted since
    UNLOADED = "unloaded"  # a caller asked for its unload: it is not loaded again


class WantEvent(Enum):
    DELAYED = "delayed"  # the model or Triton is coming back
    FAILED = "failed"
    REFUSED = "refused"
    LOADED = "loaded"  # by any load
    UNLOAD_ASKED = "unload_asked"
    TRITON_RESTARTED = "triton_restarted"


_TRIED = {
    WantEvent.DELAYED: Want.WAITING,
    WantEvent.FAILED: Want.FAILED,
    WantEvent.REFUSED: Want.REFUSED,
    WantEvent.LOADED: Want.LOADED,
    WantEvent.UNLOAD_ASKED: Want.UNLOADED,
    WantEvent.TRITON_RESTARTED: Want.WAITING,
}
# An event that a state lacks changes nothing: a try may end after another caller loaded or unloaded
# the model.
TRANSITIONS: Mapping[Want, Mapping[WantEvent, Want]] = {
    Want.WAITING: _TRIED,
    Want.FAILED: _TRIED,
    Want.REFUSED: _TRIED,
    Want.LOADED: {
        WantEvent.UNLOAD_ASKED: Want.UNLOADED,
        WantEvent.TRITON_RESTARTED: Want.WAITING,
    },
    Want.UNLOADED: {WantEvent.LOADED: Want.LOADED},
}
# Nothing is to be done, and readiness does not wait.
SETTLED = frozenset({Want.REFUSED, Want.LOADED, Want.UNLOADED})
