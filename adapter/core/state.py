"""The life of one model. Everything that affects a transition lives in this file.

`None` is the state of a model that has no record. An event that the table does not know in a state
raises, and nothing changes. docs/states.md is drawn from TRANSITIONS.
"""

from enum import Enum


class ModelState(Enum):
    FETCHING = "FETCHING"  # its files come from the store, or from the disk cache
    ON_DISK = "ON_DISK"  # its files are there and kept; it waits for a turn, a slot or room
    LOADING = "LOADING"
    READY = "READY"
    DEAD = "DEAD"  # Triton still lists it, but the process that computed it is gone
    UNLOADING = "UNLOADING"
    LOST = "RETURNING"  # Triton has lost it, and it is to be loaded again
    STUCK = "STUCK"  # Triton has not ended its load; another load of the model takes another name


LOADED = (ModelState.READY, ModelState.DEAD)  # Triton has it
COMING = frozenset({ModelState.FETCHING, ModelState.ON_DISK, ModelState.LOADING})


class WaitsFor(Enum):
    """What a load or an unload that is under way spends its time on.

    A load goes from the first to TRITON, and to UNDOING when it fails; an unload has REQUESTS and
    then TRITON.
    """

    PACKAGE = "package"  # its files are read, checked and, of an archive, unpacked
    TURN = "turn"  # earlier loads, or loads whose size is not known, come first
    MEMORY = "memory"  # it does not fit yet
    FILES = "files"  # they are linked, copied or sent to where Triton reads them
    THREAD = "thread"  # Triton works on as many loads as it has threads for
    TRITON = "triton"
    REQUESTS = "requests"  # those in flight
    UNDOING = "undoing"  # the load failed, and what there is of it is taken down


class ModelEvent(Enum):
    FETCH_BEGUN = "fetch_begun"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch_failed"
    RELEASED = "released"
    LOAD_BEGUN = "load_begun"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    PUT_BACK = "put_back"
    DIED = "died"
    UNLOAD_BEGUN = "unload_begun"
    UNLOADED = "unloaded"
    UNLOAD_FAILED = "unload_failed"
    DEAD_UNLOAD_FAILED = "dead_unload_failed"
    VANISHED = "vanished"
    LOST = "lost"
    BROKEN_OFF = "broken_off"
    ADOPTED = "adopted"
    GIVEN_UP = "given_up"
    FREED = "freed"


TRANSITIONS: dict[tuple[ModelState | None, ModelEvent], ModelState | None] = {
    # a model of a store, which calls have loaded
    (None, ModelEvent.FETCH_BEGUN): ModelState.FETCHING,
    (ModelState.FETCHING, ModelEvent.FETCHED): ModelState.ON_DISK,
    (ModelState.FETCHING, ModelEvent.FETCH_FAILED): None,
    (None, ModelEvent.FETCHED): ModelState.ON_DISK,  # while another version was loaded
    (ModelState.ON_DISK, ModelEvent.LOAD_BEGUN): ModelState.LOADING,
    (ModelState.LOADING, ModelEvent.PUT_BACK): ModelState.ON_DISK,  # and is tried again
    (ModelState.ON_DISK, ModelEvent.RELEASED): None,
    # somebody else has loaded it by its name meanwhile
    (ModelState.FETCHING, ModelEvent.LOAD_BEGUN): ModelState.LOADING,
    (ModelState.FETCHING, ModelEvent.ADOPTED): ModelState.READY,
    (ModelState.ON_DISK, ModelEvent.ADOPTED): ModelState.READY,
    # any model
    (None, ModelEvent.LOAD_BEGUN): ModelState.LOADING,
    (ModelState.LOADING, ModelEvent.LOADED): ModelState.READY,
    (ModelState.LOADING, ModelEvent.LOAD_FAILED): None,
    (ModelState.LOADING, ModelEvent.GIVEN_UP): ModelState.STUCK,
    # an earlier run loaded it, or began to
    (None, ModelEvent.ADOPTED): ModelState.READY,
    (None, ModelEvent.GIVEN_UP): ModelState.STUCK,
    (ModelState.STUCK, ModelEvent.LOAD_FAILED): ModelState.STUCK,
    (ModelState.STUCK, ModelEvent.FREED): None,
    (ModelState.READY, ModelEvent.DIED): ModelState.DEAD,
    (ModelState.READY, ModelEvent.UNLOAD_BEGUN): ModelState.UNLOADING,
    (ModelState.DEAD, ModelEvent.UNLOAD_BEGUN): ModelState.UNLOADING,
    (ModelState.UNLOADING, ModelEvent.UNLOADED): None,
    # the model is still there as far as anybody knows
    (ModelState.UNLOADING, ModelEvent.UNLOAD_FAILED): ModelState.READY,
    (ModelState.UNLOADING, ModelEvent.DEAD_UNLOAD_FAILED): ModelState.DEAD,
    # Triton was to load it again, to be rid of it, and does not end that load
    (ModelState.UNLOADING, ModelEvent.GIVEN_UP): ModelState.STUCK,
    # Triton was restarted under us
    (ModelState.READY, ModelEvent.VANISHED): None,
    (ModelState.DEAD, ModelEvent.VANISHED): None,
    (ModelState.READY, ModelEvent.LOST): ModelState.LOST,
    (ModelState.DEAD, ModelEvent.LOST): ModelState.LOST,
    (ModelState.LOST, ModelEvent.LOAD_BEGUN): ModelState.LOADING,
    # Triton ended once more, during the load that was to bring the model back
    (ModelState.LOADING, ModelEvent.BROKEN_OFF): ModelState.LOST,
    (ModelState.LOST, ModelEvent.VANISHED): None,
}


class IllegalTransition(Exception):
    pass


def advance(state: ModelState | None, event: ModelEvent) -> ModelState | None:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        name = state.value if state else "absent"
        raise IllegalTransition(f"{event.value} in state {name}") from None
