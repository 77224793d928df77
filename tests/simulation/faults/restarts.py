"""Faults around ends of Triton, and of the adapter."""

from adapter.control.desired import DesiredModels
from adapter.control.reconciler import Reconciler
from adapter.control.triton_status import TritonStatus
from tests.simulation.faults.fault import Fault

_GONE = "if r.name not in ready and self._registry.get(r.id) is r and r.state in LOADED"

RESTARTS = [
    Fault(
        "a late answer about an earlier life counts as an end of Triton",
        "one hang of an external Triton counts as three ends, and a model is given up",
        TritonStatus,
        "follows_an_end",
        "or incarnation != self.now()",
        "",
        test="tests/control/reconciler/test_recovery.py"
        "::test_a_late_answer_about_an_earlier_life_of_triton_is_no_end",
    ),
    Fault(
        "models are forgotten when Triton ends",
        "404 for good after a restart of Triton, though they were to come back",
        TritonStatus,
        "comes_back",
        "return self.come_back and record.can_load_again and (is_sure or has_ended)",
        "return False",
    ),
    Fault(
        "a model that becomes ready during a look counts as lost",
        "a load that has just ended well is not found",
        Reconciler,
        "reconcile",
        "ready = await self._triton.ready()",
        "ready = await self._triton.ready()\n"
        "    before = [r for r in self._registry.records() if r.state in LOADED]",
    ),
    Fault(
        "models are taken for what they were before a look",
        "a model that is being unloaded, or was loaded again meanwhile, is lost",
        Reconciler,
        "reconcile",
        _GONE,
        "if r.name not in ready",
    ),
    Fault(
        "lost models are not looked for",
        "models that Triton has lost are served for ever",
        Reconciler,
        "reconcile",
        _GONE,
        "if False",
    ),
    Fault(
        "a return that Triton breaks off is given up",
        "a second end of Triton loses all models",
        DesiredModels,
        "after",
        "return ModelEvent.BROKEN_OFF",
        "return ModelEvent.LOAD_FAILED",
    ),
    Fault(
        "returns stop after the first",
        "of the models that Triton has lost some stay away",
        DesiredModels,
        "begin",
        "self._begin(self._models.setdefault(record.id, made))",
        "self._begin(self._models.setdefault(record.id, made))\n            break",
    ),
    Fault(
        "a Triton that has only been slow counts as another one",
        "what it has loaded meanwhile, and was given up, stays loaded, and its bytes count as free",
        Reconciler,
        "free_stuck",
        "present, ready = await self._triton.present(), await self._triton.ready()",
        "present, ready = set(), set()",
    ),
    Fault(
        "Triton is not restarted when all its threads hang",
        "no model can be loaded any more",
        Reconciler,
        "restart_if_stuck",
        "reason is not None\n",
        "False\n",
    ),
    Fault(
        "what is not ready is adopted",
        "models that Triton does not serve are served",
        Reconciler,
        "take_stock",
        "if is_kept and ready.issuperset(model.placement.names):",
        "if is_kept:",
    ),
    Fault(
        "what an earlier run left is taken for Triton's own memory",
        "the baseline has the bytes of a model that is gone, and loads are refused",
        Reconciler,
        "take_stock",
        "if are_left:",
        "if False:",
    ),
    Fault(
        "what is not adopted is left in Triton",
        "memory is taken by models that nobody knows",
        Reconciler,
        "take_stock",
        "await self._unload_staged(model)",
        "await self._packages.remove(model.name)",
    ),
    Fault(
        "the lost model's bytes stay",
        "after an end of Triton memory seems full",
        Reconciler,
        "_lose",
        "self._memory.unloaded(record)",
        "pass",
    ),
]
