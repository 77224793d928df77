"""Define the states of a model, its events, and the state that follows each of them.

`None` is the state of a model without a record, which is absent. An operation moves the record that
it works on, and holds the lock of that model. When Triton exits, the watcher moves the records at
rest; an operation learns of the exit by its own call to Triton, and moves its record itself.

An event that the table lacks raises, and nothing changes.
"""

from collections.abc import Mapping
from enum import Enum


class ModelState(Enum):
    """The states that a record can have. An absent model is one without a record."""

    # Triton was not asked yet: the files are fetched and inspected, and the load waits for memory.
    PREPARING = "PREPARING"
    # Triton was asked to load it. Memory is reserved, and its folder is in Triton's repository.
    LOADING = "LOADING"
    # Triton serves it, and callers get leases.
    READY = "READY"
    # Triton still lists it, but the process that computed it is gone: each request would fail. Its
    # name and its memory stay taken until it is unloaded.
    DEAD = "DEAD"
    # New calls are refused. The requests in flight end, and then Triton unloads the model. A failed
    # load has this state too, since Triton may hold a part of it.
    UNLOADING = "UNLOADING"
    # Triton does not finish an unload. The name in Triton and the bytes stay taken. The id is free:
    # another load of the model takes another name.
    STUCK = "STUCK"
    # Triton exited with it, and the adapter loads it again. Callers get an error that asks them to
    # try again (ModelNotReady), not one that makes them load it. Name and bytes are free.
    LOST = "LOST"


class ModelEvent(Enum):
    """The events in the life of a model. Their values are shown in the log and in the diagram."""

    LOAD_STARTED = "load_started"
    ADOPTED = "adopted"  # an earlier run of the adapter had loaded it, and Triton still serves it
    LOAD_SENT = "load_sent"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    OUT_OF_MEMORY = "out_of_memory"  # Triton has let the load go, and may be asked once more
    UNLOAD_STARTED = "unload_started"
    PROCESS_DIED = "process_died"
    UNLOADED = "unloaded"
    GIVEN_UP = "given_up"  # Triton did not finish the unload in time
    FREED = "freed"  # Triton has finished after all
    # Triton exited, or somebody has unloaded the model past the adapter. The adapter does not load
    # the model again; with LOST it does.
    TRITON_EXITED = "triton_exited"
    LOST = "lost"
    FORGOTTEN = "forgotten"  # an unload was asked for


_S = ModelState
_E = ModelEvent

TRANSITIONS: Mapping[tuple[ModelState | None, ModelEvent], ModelState | None] = {
    (None, _E.LOAD_STARTED): _S.PREPARING,
    (None, _E.ADOPTED): _S.READY,
    (_S.PREPARING, _E.LOAD_SENT): _S.LOADING,
    (_S.PREPARING, _E.LOAD_FAILED): None,
    (_S.PREPARING, _E.LOST): _S.LOST,
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.LOADING, _E.LOAD_FAILED): _S.UNLOADING,
    (_S.LOADING, _E.OUT_OF_MEMORY): _S.PREPARING,
    (_S.LOADING, _E.TRITON_EXITED): None,
    (_S.LOADING, _E.LOST): _S.LOST,
    (_S.READY, _E.UNLOAD_STARTED): _S.UNLOADING,
    (_S.READY, _E.PROCESS_DIED): _S.DEAD,
    (_S.READY, _E.TRITON_EXITED): None,
    (_S.READY, _E.LOST): _S.LOST,
    (_S.DEAD, _E.UNLOAD_STARTED): _S.UNLOADING,
    (_S.DEAD, _E.TRITON_EXITED): None,
    (_S.DEAD, _E.LOST): _S.LOST,
    (_S.UNLOADING, _E.UNLOADED): None,
    (_S.UNLOADING, _E.GIVEN_UP): _S.STUCK,
    (_S.STUCK, _E.FREED): None,
    (_S.STUCK, _E.TRITON_EXITED): None,
    (_S.LOST, _E.LOAD_STARTED): _S.PREPARING,
    (_S.LOST, _E.FORGOTTEN): None,
}

# A load is in progress.
BEING_LOADED = frozenset({ModelState.PREPARING, ModelState.LOADING})

# Triton has the model, whether or not it can serve.
LOADED = frozenset({ModelState.READY, ModelState.DEAD})

# No operation works on a record in these states, so an exit of Triton moves it at once.
AT_REST = frozenset({ModelState.READY, ModelState.DEAD, ModelState.STUCK})


class IllegalTransition(Exception):
    """A bug: an event in a state that does not expect it."""


def advance(state: ModelState | None, event: ModelEvent) -> ModelState | None:
    """Return the state that follows. Raises IllegalTransition for an event that the table lacks."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        name = state.value if state else "absent"
        raise IllegalTransition(f"{event.value} in state {name}") from None
