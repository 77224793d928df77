"""The life of an artifact that callers ask for by its key. Everything that affects a transition
lives in this file; docs/states.md is drawn from TRANSITIONS.

ABSENT is the state of an artifact without an entry. An event that the table does not know in a
state raises, and nothing changes.
"""

from enum import Enum


class ResidencyState(Enum):
    ABSENT = "absent"
    FETCHING = "fetching"  # its files come from the store, or from the disk cache
    ON_DISK = "on disk"  # its files are there and kept; it waits for a turn, for room, for a call
    LOADING = "loading"
    RESIDENT = "resident"
    UNLOADING = "unloading"


class ResidencyEvent(Enum):
    ASKED_FOR = "asked_for"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch_failed"
    LOAD_BEGUN = "load_begun"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    NO_ROOM = "no_room"  # something else has to go first
    UNLOAD_BEGUN = "unload_begun"
    UNLOADED = "unloaded"
    UNLOAD_FAILED = "unload_failed"
    LOST = "lost"  # it died, Triton lost it, or somebody else unloaded it
    RELEASED = "released"  # its files may leave the disk


_STATE, _EVENT = ResidencyState, ResidencyEvent

TRANSITIONS: dict[tuple[ResidencyState, ResidencyEvent], ResidencyState] = {
    (_STATE.ABSENT, _EVENT.ASKED_FOR): _STATE.FETCHING,
    (_STATE.FETCHING, _EVENT.FETCHED): _STATE.ON_DISK,
    (_STATE.FETCHING, _EVENT.FETCH_FAILED): _STATE.ABSENT,
    (_STATE.ON_DISK, _EVENT.LOAD_BEGUN): _STATE.LOADING,
    (_STATE.ON_DISK, _EVENT.RELEASED): _STATE.ABSENT,
    (_STATE.LOADING, _EVENT.LOADED): _STATE.RESIDENT,
    (_STATE.LOADING, _EVENT.NO_ROOM): _STATE.ON_DISK,
    (_STATE.LOADING, _EVENT.LOAD_FAILED): _STATE.ON_DISK,
    (_STATE.RESIDENT, _EVENT.UNLOAD_BEGUN): _STATE.UNLOADING,
    (_STATE.RESIDENT, _EVENT.LOST): _STATE.ON_DISK,
    (_STATE.UNLOADING, _EVENT.UNLOADED): _STATE.ON_DISK,
    (_STATE.UNLOADING, _EVENT.UNLOAD_FAILED): _STATE.RESIDENT,
}


class IllegalResidency(Exception):
    pass


def advance(state: ResidencyState, event: ResidencyEvent) -> ResidencyState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalResidency(f"{event.value} in state {state.value}") from None
