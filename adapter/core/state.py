"""The life of one model. Everything that affects a transition lives in this file.

`None` is the state of a model that has no record. An event that the table does not know in a state
raises, and nothing changes. docs/states.md is drawn from TRANSITIONS.
"""

from enum import Enum


class ModelState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    DEAD = "DEAD"  # Triton still lists it, but the process that computed it is gone
    UNLOADING = "UNLOADING"


class ModelEvent(Enum):
    LOAD_BEGUN = "load_begun"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    DIED = "died"
    UNLOAD_BEGUN = "unload_begun"
    UNLOADED = "unloaded"
    UNLOAD_FAILED = "unload_failed"
    DEAD_UNLOAD_FAILED = "dead_unload_failed"
    VANISHED = "vanished"


TRANSITIONS: dict[tuple[ModelState | None, ModelEvent], ModelState | None] = {
    (None, ModelEvent.LOAD_BEGUN): ModelState.LOADING,
    (ModelState.LOADING, ModelEvent.LOADED): ModelState.READY,
    (ModelState.LOADING, ModelEvent.LOAD_FAILED): None,
    (ModelState.READY, ModelEvent.DIED): ModelState.DEAD,
    (ModelState.READY, ModelEvent.UNLOAD_BEGUN): ModelState.UNLOADING,
    (ModelState.DEAD, ModelEvent.UNLOAD_BEGUN): ModelState.UNLOADING,
    (ModelState.UNLOADING, ModelEvent.UNLOADED): None,
    # the model is still there as far as anybody knows
    (ModelState.UNLOADING, ModelEvent.UNLOAD_FAILED): ModelState.READY,
    (ModelState.UNLOADING, ModelEvent.DEAD_UNLOAD_FAILED): ModelState.DEAD,
    # Triton was restarted under us
    (ModelState.READY, ModelEvent.VANISHED): None,
    (ModelState.DEAD, ModelEvent.VANISHED): None,
}


class IllegalTransition(Exception):
    pass


def advance(state: ModelState | None, event: ModelEvent) -> ModelState | None:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        name = state.value if state else "absent"
        raise IllegalTransition(f"{event.value} in state {name}") from None
