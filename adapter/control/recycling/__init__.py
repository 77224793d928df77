"""Restarts an embedded Triton in place, to free memory that is lost in it.

`Recycling` does it, `LostMemory` decides when.
"""

from adapter.control.recycling.recycling import NotRecycled as NotRecycled
from adapter.control.recycling.recycling import Recycling as Recycling
