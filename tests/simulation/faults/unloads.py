"""Faults of unloads, leases and deaths."""

from adapter.control.housekeeping import Housekeeping
from adapter.control.lease import Lease, Leases
from adapter.control.models import ModelControl
from adapter.control.reconciler import Reconciler
from adapter.control.unloader import Unloader
from adapter.control.unloads import Unloads
from tests.simulation.faults.fault import Fault

UNLOADS = [
    Fault(
        "an unload does not wait for requests",
        "requests in flight lose their model",
        Leases,
        "drained",
        "if record.usage.in_flight == 0:",
        "if True:",
    ),
    Fault(
        "a caller who leaves ends the lease",
        "Triton is told to unload amid a request that it still computes",
        Lease,
        "abandon",
        "if self.state == _HELD:",
        "self.end()\n    if self.state == _HELD:",
    ),
    Fault(
        "an unload is answered before Triton has let go",
        "the next load does not find the memory that the last unload promised",
        Unloader,
        "unload",
        "left = await self._triton.wait_gone(names, _NORMAL_SECONDS)",
        "left = set()",
    ),
    Fault(
        "an unload is answered before the processes have ended",
        "a process that survives keeps the memory, and nobody ends it",
        Unloader,
        "unload",
        "await self._see_ended(record, processes, reloaded=left, to_the_end=to_the_end)",
        "pass",
    ),
    Fault(
        "a model that has died is unloaded as any other",
        "its unload never ends",
        Unloader,
        "_end_soon",
        "await self._unload_again(record, left, is_dead=is_dead)",
        "raise _not_gone(record)",
    ),
    Fault(
        "a failed unload leaves the model UNLOADING",
        "the model can neither be used nor loaded nor unloaded",
        Unloads,
        "_failed",
        "self.registry.apply(record, failed)",
        "pass",
    ),
    Fault(
        "an unload keeps its bytes booked",
        "what was freed is never given to anybody",
        Unloads,
        "unload",
        "held = self.memory.unloaded(record)",
        "held = self.memory.ledger.of(record.name)",
    ),
    Fault(
        "an unload leaves the folders",
        "the repository fills with folders that no model has",
        Unloads,
        "unload",
        "await self.remove(record)",
        "pass",
    ),
    Fault(
        "the unload of a model that is being loaded waits for the load",
        "an unload takes as long as a load that hangs",
        ModelControl,
        "unload",
        "self.loads.end(model_id)",
        "[]",
    ),
    Fault(
        "the death of a process is not noticed",
        "a model without a process is given one request after the other",
        Reconciler,
        "_suspect",
        "elif record not in self._checks and record.state is ModelState.READY:",
        "elif False:",
    ),
    Fault(
        "a model that Triton never ends loading again is unloaded again and again",
        "each unload of it takes as long as the first",
        Unloader,
        "_unload_again",
        "self.give_up(record)",
        "pass",
    ),
    Fault(
        "a load that was given up is never cleared away",
        "what Triton has loaded in the end stays there, and no model is it",
        Housekeeping,
        "_poll_triton",
        "await self._reconciler.free_stuck()",
        "pass",
    ),
    Fault(
        "a failed undo leaves a model that no record has",
        "what Triton keeps after it is never unloaded",
        Unloader,
        "_is_given_up_with",
        "known = self._registry.get(record.id)",
        "return False",
    ),
    Fault(
        "an unload that was given up loads the model again for nobody",
        "Triton has it once its load ends, and no record does",
        Reconciler,
        "_clear_vanished",
        "is_loading = bool(names & loading)",
        "is_loading = False",
        test="tests/simulation/test_short_days.py"
        "::test_a_day_is_right_unless_the_fault_is_put_back",
    ),
]
