"""Faults of loads."""

from adapter.control.load_limit import LoadLimit, LoadThreads
from adapter.control.loader import Loader
from adapter.control.models import ModelControl
from adapter.control.operations import Operations
from adapter.core.registry import Registry
from tests.simulation.faults.fault import Fault

_ONCE = (ModelControl, "_load_once")

LOADS = [
    Fault(
        "a load that Triton does not end is tried again without its files",
        "the model is loaded for calls, and neither an idle model nor one to evict",
        ModelControl,
        "_load",
        "and not has_files",
        "and False",
    ),
    Fault(
        "a failed load keeps its reservation",
        "each failure leaves bytes booked, until everything is refused",
        *_ONCE,
        "undo.push_async_callback(self._loader.load_undone, record)",
        "pass",
    ),
    Fault(
        "a failed load is not unloaded",
        "Triton goes on with a load whose caller was told that it failed, and serves it in the end",
        *_ONCE,
        "undo.push_async_callback(self._undo, record, lambda: self._loader.undo(record))",
        "pass",
    ),
    Fault(
        "a failed load leaves its folders",
        "the repository fills with folders that no model has",
        *_ONCE,
        "undo.push_async_callback(self._undo, record, lambda: self.unloads.remove(record))",
        "pass",
    ),
    Fault(
        "a failed load stays in the registry",
        "the model can never be loaded again",
        *_ONCE,
        "undo.push(partial(self._load_failed, record, lost))",
        "pass",
    ),
    Fault(
        "a load is not noted for the next run",
        "an adapter that is started again unloads what it should adopt",
        *_ONCE,
        "await self._packages.confirm(record.name, source, package.content_key, held)",
        "pass",
    ),
    Fault(
        "a load's caller waits for its undo",
        "a load that hangs keeps its caller long after the limit",
        LoadLimit,
        "outcome",
        "timeout=seconds, return_when",
        "timeout=None, return_when",
    ),
    Fault(
        "a failed load keeps its place among Triton's load threads",
        "after four failures every load waits for ever",
        LoadThreads,
        "give_back",
        "load = self._inside.pop(record, None)",
        "load = self._inside.pop(record, None) if self._inside.get(record) is None else None",
    ),
    Fault(
        "operations of a model are not one after the other",
        "a load begins amid the unload before it",
        Operations,
        "lock",
        "return self._locks.setdefault(model_id, asyncio.Lock())",
        "return asyncio.Lock()",
    ),
    Fault(
        "a name is taken that Triton is stuck with",
        "the load waits behind the one that hangs under this name",
        Registry,
        "_is_taken",
        "owners = (self._names.get(name), owner, self.stuck.get(name))",
        "owners = (self._names.get(name), owner)",
    ),
    Fault(
        "a model whose process died during its load is waited for",
        "the load keeps its caller, and a thread of Triton, to the limit",
        Loader,
        "_load_one",
        "if (lost := await self._lost_stub(monitor)) is None:",
        "if (lost := None) is None:",
    ),
]
