"""Models that callers ask for by their keys: fetched, loaded, and evicted for others.

`Residency` is what frontends use; artifacts come through `Artifacts` of adapter/control/ports.py.
"""

from adapter.control.residency.engine import Options as Options
from adapter.control.residency.engine import Residency as Residency
