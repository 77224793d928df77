"""Rule 3 of the oracle for growth under traffic: the ledger has it within its documented time."""

import asyncio
from functools import partial

from adapter.core.memory import total
from tests.simulation.memory import MIB
from tests.simulation.models import Violated
from tests.simulation.triton import Held

SLACK_BYTES = 16 * MIB
# "every two seconds while models have requests" (docs/memory.md), and what a look takes
_NOTICED_SECONDS = 6.0
_UPSET = ("unread", "hang", "end", "restart", "stub ended", "strangers", "leak")


class Growth:
    """Looks, a while after a model has grown, whether the ledger knows."""

    def __init__(self, world: object) -> None:
        self._world = world

    def grew(self, held: Held) -> None:
        """To be called when a request has made the model take more."""
        world = self._world
        # where readings tell processes apart
        if world.reader.kind != "host" or not held.spec.is_python or world.control is None:
            return
        taken = world.bytes_of(held)
        judge = world.judged(partial(self._look, world.control, held, taken, world.now))
        asyncio.get_running_loop().look_later(_NOTICED_SECONDS, judge)

    def _look(self, control: object, held: Held, taken: int, moment: float) -> None:
        world = self._world
        is_there = held in world.all_held() and held.state == "READY"
        record = next((r for r in control.models.registry.records() if r.name == held.name), None)
        if world.control is not control or not is_there or held.process.over.is_set():
            return
        if record is None or world.oracle.since(moment - 30.0, *_UPSET):
            return
        # both processes were measured where an unload went on beside the next load of the model
        if world.oracle.since(0.0, "unload", model_id=held.spec.model_id):
            return
        booked = total(control.state.held(record))
        if booked < taken * 0.9 - SLACK_BYTES:
            said = f"{record.id} has {booked // MIB} MiB, and took {taken // MIB} 6 s ago"
            raise Violated("3 growth", said)
