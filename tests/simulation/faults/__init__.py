"""Lists faults that the oracle must see, each planted at a port or at the door."""

from tests.simulation.faults.door import DOOR
from tests.simulation.faults.fault import Fault
from tests.simulation.faults.ports import PORTS

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*PORTS, *DOOR)}
