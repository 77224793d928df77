"""Plants faults at the door: calls are answered wrongly, or show what is not so."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adapter.core.artifacts import ArtifactKey
from tests.simulation.control import Control
from tests.simulation.faults.fault import Changed, Fault


def _lease_changed(change: Callable[[Any], Any]) -> Callable[[Control], Control]:
    """Return what changes all leases of a control."""

    def changed(control: Control) -> Any:
        async def wait_for_lease(model_id: Any, key: Any) -> Any:
            lease, use = await control.stores.wait_for_lease(model_id, key)
            return change(lease), use

        models = Changed(control.models, lease=lambda name: change(control.models.lease(name)))
        stores = control.stores
        if stores is not None:
            stores = Changed(stores, wait_for_lease=wait_for_lease)
        return Changed(control, models=models, stores=stores)

    return changed


def _unheld(lease: Any) -> Changed:
    return Changed(lease, begin=bool, abandon=bool, end=lambda error=None: error)


def _answered_early(verb: str) -> Callable[[Control], Control]:
    def changed(control: Control) -> Any:
        async def call(*args: Any, **log_fields: str) -> Any:
            work = asyncio.ensure_future(getattr(control.models, verb)(*args, **log_fields))
            await asyncio.wait({work}, timeout=0.01)
            return await work if work.done() else None

        return Changed(control, models=Changed(control.models, **{verb: call}))

    return changed


async def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _keep_past_purge(control: Control) -> Any:
    return Changed(control, models=Changed(control.models, unload_all=_nothing))


def _call_for_platform(control: Control) -> Any:
    """Load models of a store for calls alone, whoever asks."""
    if control.stores is None:
        return control

    async def load(model_id: Any, is_forced: bool = False) -> bool:
        await control.stores.wait_for_lease(model_id, ArtifactKey("", model_id))
        return True

    return Changed(control, stores=Changed(control.stores, load=load))


def _measured_at_once(control: Control) -> Any:
    def size_of(record: Any) -> Any:
        held = dict.fromkeys(control.state.devices(), 1)
        size = control.state.size_of(record)
        return replace(size, held=held, is_learned=True, is_measured=True)

    return Changed(control, state=Changed(control.state, size_of=size_of))


def _show_twice_the_limit(control: Control) -> Any:
    def devices(reading: Any = None) -> Any:
        known = control.state.devices(reading).items()
        return {
            device: replace(shown, memory_reserve_bytes=-shown.limit_bytes)
            for device, shown in known
        }

    return Changed(control, state=Changed(control.state, devices=devices))


DOOR = [
    Fault(
        "an unload does not wait for requests",
        "requests in flight lose their model",
        control=_lease_changed(_unheld),
    ),
    Fault(
        "a caller who leaves ends the lease",
        "Triton is told to unload amid a request that it still computes",
        control=_lease_changed(lambda lease: Changed(lease, abandon=lease.end)),
    ),
    Fault(
        "a load is answered before it is over",
        "the caller's requests find no model",
        control=_answered_early("load"),
    ),
    Fault(
        "an unload is answered before it is over",
        "the model and its memory are still there",
        control=_answered_early("unload"),
    ),
    Fault(
        "ModelMesh is told that all memory is free beside models",
        "it fills memory that others have, and each of its loads fails",
        control=_keep_past_purge,
    ),
    Fault(
        "ModelMesh is told all of the limit",
        "the baseline and one load of unknown size have no room",
        control=_show_twice_the_limit,
    ),
    Fault(
        "modelSize does not wait for the measurement",
        "ModelMesh counts a guess for as long as the model is loaded",
        control=_measured_at_once,
    ),
    Fault(
        "what a platform has loaded is evicted",
        "the platform calls a model that it believes to be loaded",
        control=_call_for_platform,
    ),
]
