"""Faults that the adapter once had, or might have had, each put back by one changed function."""

from tests.simulation.faults.fault import Fault
from tests.simulation.faults.loads import LOADS
from tests.simulation.faults.memory import MEMORY
from tests.simulation.faults.restarts import RESTARTS
from tests.simulation.faults.unloads import UNLOADS

FAULTS: dict[str, Fault] = {each.name: each for each in (*LOADS, *UNLOADS, *MEMORY, *RESTARTS)}
