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

# Those that a minute of days does not find: the world seldom brings them out, or the oracle allows
# what they break.
MISSED = frozenset(
    {
        "what a load that is undone gives back is charged to others",
        "a load in processes of its own has a share of what others took",
        "what stood still takes nothing any more",
        "a load of V2 asks again at once while another is taken down",
        "a load of V2 does not look whether the files have changed",
        "a package that was too large once is so for a day",
        "models do not come back from a recycle where others reload them",
        "a load is refused for room that the undo of another makes",
        "a load that was not read is never measured",
        "what stands still is charged to others",
        "a model that Triton never ends loading again is unloaded again and again",
        "a share of what several took counts for less than is declared",
        # a model that an unload has given up is STUCK by now, which covers this one
        "an unload that was given up loads the model again for nobody",
        # 122 to 156 days of a minute of CPU did not find these
        "a model whose process died during its load is waited for",
        "a load of V2 does not take the failure of another for its own",
        "a load of V2 is content with one that read older files",
        "a model that seems to take nothing is never evicted",
        "a folder that changes amid its fetch is kept",
        "Triton is not restarted when all its threads hang",
        "ModelMesh is told that all memory is free beside models",
        "a load of ModelMesh waits for no unload that is to come",
        "a load of V2 asks again at once while another waits for Triton to come back",
    }
)
