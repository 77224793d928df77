"""Faults that the adapter once had, or might have had, each put back by one changed function."""

from tests.simulation.faults.fault import Fault
from tests.simulation.faults.loads import LOADS
from tests.simulation.faults.memory import MEMORY
from tests.simulation.faults.platforms import PLATFORMS
from tests.simulation.faults.residency import RESIDENCY
from tests.simulation.faults.restarts import RESTARTS
from tests.simulation.faults.unloads import UNLOADS

_ALL = (*LOADS, *UNLOADS, *MEMORY, *RESTARTS, *PLATFORMS, *RESIDENCY)
FAULTS: dict[str, Fault] = {each.name: each for each in _ALL}

# Those that a minute of days does not find. Each fails a test of its own, or a day that was kept.
_DAYS = frozenset(
    {
        "a load that Triton does not end is tried again without its files",
        "an adopted model is not known by its package",
        "a load of unknown size is taken to need nothing of what several took",
        "what an earlier run left is taken for Triton's own memory",
        "a load is refused for room that the undo of another makes",
        "a load that was not read is never measured",
        "a model that Triton never ends loading again is unloaded again and again",
        "what a load that is undone gives back is charged to others",
        "a load of V2 does not take the failure of another for its own",
        "a load of V2 is content with one that read older files",
        "a load of V2 asks again at once while another waits for Triton to come back",
    }
)
MISSED = _DAYS | {each.name for each in _ALL if each.test}
