"""Faults of admission, the ledger and what failures are taken for."""

from adapter.control.memory import Memory
from adapter.control.progress import Admission
from adapter.control.readings import Readings
from adapter.core import measuring
from adapter.core.accounts import Accounts
from adapter.core.evidence import Suspicion
from adapter.core.ledger import DeviceBook, Ledger
from adapter.core.residency.placement import Placer
from adapter.core.sizing import Sizes
from tests.simulation.faults.fault import Fault

MEMORY = [
    Fault(
        "a load of unknown size is taken to need nothing of what several took",
        "another is charged with all that both took: it seems larger than its GPU",
        measuring,
        "_weights",
        "else mean",
        "else 0",
    ),
    Fault(
        "an adopted model is not known by its package",
        "a text of a caller is believed again once the model is loaded anew: a 507 too many",
        Memory,
        "adopt",
        "Account(record, record.package_key, known",
        'Account(record, "", known',
    ),
    Fault(
        "only the GPU with least free is tried",
        "loads are refused, and models evicted, though another GPU has room",
        Placer,
        "options",
        "for e in left]",
        "for e in left[-1:]]",
    ),
    Fault(
        "a model is put on another GPU than the one that has its reservation",
        "GPU 0 runs out of memory",
        Admission,
        "admitted",
        "estimate.gpu.number if",
        "0 if",
    ),
    Fault(
        "reservations do not count",
        "two loads are let in to the same room",
        DeviceBook,
        "left_bytes",
        "return self.limit_bytes - max(booked, (used_bytes or 0) + self.reserved_bytes)",
        "return self.limit_bytes - (used_bytes or 0)",
    ),
    Fault(
        "a load of unknown size is let in beside others",
        "the growth of both is taken for one's, and both run out of memory together",
        Memory,
        "_inputs",
        "loads=len(loads)",
        "loads=0",
    ),
    Fault(
        "a load is refused for room that is to come",
        "507 while an unload is under way, and the platform unloads one more",
        Memory,
        "_inputs",
        "unloads=self._count_unloads(is_planned=is_planned)",
        "unloads=0",
    ),
    Fault(
        "a load is refused for room that the undo of another makes",
        "507 while a failed load is unloaded, and the platform unloads one more",
        Memory,
        "undoing",
        "self._undone.add(record)",
        "pass",
    ),
    Fault(
        "growth under traffic is not measured",
        "the ledger has less than the models take, and lets too many in",
        Memory,
        "tick",
        "if reading is not None and operations == self._operations:",
        "if False:",
    ),
    Fault(
        "a load that was not read is never measured",
        "a model has no bytes in the ledger, for as long as it is loaded",
        Accounts,
        "_read_late",
        "if reading is None:",
        "if True:",
    ),
    Fault(
        "what a load that is undone gives back is charged to others",
        "a load beside it seems as much smaller, and too much is let in beside its model",
        Accounts,
        "undone",
        "self.released(name, held)",
        "pass",
    ),
    Fault(
        "a load in processes of its own has a share of what others took",
        "a load beside one that stands still seems smaller, and too much is let in beside it",
        Accounts,
        "close",
        "if is_new and not _is_apart(account, reading):",
        "if is_new:",
        test="tests/unit/core/test_accounts.py"
        "::test_a_load_in_processes_of_its_own_that_stands_still_has_no_share_of_the_rest",
    ),
    Fault(
        "what stood still is charged to others",
        "a load that took its memory late makes another seem as large as both",
        Accounts,
        "loaded",
        "self._window.loaded_beside(name, needs)",
        "self._window.disturbed()",
        test="tests/unit/core/test_accounts.py"
        "::test_what_a_load_takes_that_stood_still_is_not_charged_to_one_beside_it",
    ),
    Fault(
        "what stands still is charged to others",
        "a model whose size was known seems as large as another that was warming up beside it",
        Accounts,
        "close",
        "self._window.loaded_beside(account.name, account.estimate.needs)",
        "self._window.disturbed()",
        test="tests/unit/core/test_accounts.py"
        "::test_what_a_load_takes_that_stood_still_is_not_charged_to_one_beside_it",
    ),
    Fault(
        "what stood still takes nothing any more",
        "a load that goes on after seconds is taken for a part of another, exactly measured model",
        Accounts,
        "close",
        "self._window.disturbed()  # it may have gone on",
        "account.is_passed or account.still_since is not None or self._window.disturbed()",
        test="tests/control/memory/test_turns.py"
        "::test_nobody_waits_for_a_load_that_takes_nothing_and_is_measured_all_the_same",
    ),
    Fault(
        "a share of what several took counts for less than is declared",
        "a load is let in to less than it takes, after one beside a model that declares too much",
        Sizes,
        "learn",
        "max(count, least)",
        "count",
        test="tests/unit/core/test_sizing.py::test_a_share_is_not_below_what_is_declared",
    ),
    Fault(
        "an adopted model has no bytes",
        "after a restart of the adapter all memory seems free",
        Memory,
        "adopt",
        "self.ledger.hold(record.name, held)",
        "pass",
    ),
    Fault(
        "a settled reservation stays reserved",
        "each load counts twice",
        Ledger,
        "settle",
        "self.hold(name, known.amounts if measured is None else measured)",
        "pass",
    ),
    Fault(
        "a text that means memory is always believed",
        "a caller who sends such words has one model after the other unloaded",
        Suspicion,
        "judged",
        "if is_first:",
        "if True:",
    ),
    Fault(
        "each failure that may be of memory is taken for one",
        "507 for a process that died of something else",
        Readings,
        "judged",
        "judged = corroborated(error, view, MemoryFigures())",
        "judged = corroborated(error, type(view).LOW, MemoryFigures())",
    ),
    Fault(
        "bytes of a load that was given up are never freed",
        "a load that hung once keeps its reservation for good",
        Memory,
        "freed",
        "self.ledger.release(record.name)",
        "pass",
    ),
]
