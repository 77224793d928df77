"""Takes a model out of Triton, and knows when it is really gone, and what is stuck for good."""

import logging

from adapter.control.ports import Server, TimeLimits, Triton
from adapter.core.model import ModelId, TritonName
from adapter.core.names import replacement_name, triton_name
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AdapterError, BackendTimeout

log = logging.getLogger(__name__)

# What Triton takes at most to let go of a model whose process has ended as it should.
_NORMAL_SECONDS = 1.0


class Teardown:
    """`stuck`: models whose load does not end, by their names. Triton has a few threads for loads
    and each such model keeps one; mostly for good, until Triton is restarted.
    """

    def __init__(self, triton: Triton, server: Server | None, limits: TimeLimits) -> None:
        self.stuck: dict[TritonName, ModelRecord] = {}
        self._triton = triton
        self._server = server
        self._limits = limits

    def give_up(self, record: ModelRecord) -> None:
        """Triton does not answer for this load, and an unload would wait for it as well."""
        self.stuck[record.name] = record
        log.error("model.load_stuck", extra={"model_id": record.id, "stuck": len(self.stuck)})

    def free_name(self, model_id: ModelId) -> TritonName:
        """The model's name in Triton, or another while Triton is stuck with that one."""
        name, number = triton_name(model_id), 0
        while name in self.stuck:
            number += 1
            name = replacement_name(model_id, number)
        return name

    async def bring_down(self, record: ModelRecord, *, is_dead: bool = False) -> None:
        """Unload, and return when nothing is left but what is stuck.

        The unload of a model whose python process has died stays in UNLOADING for ever. Loading
        the same name again gives Triton a live process, and the unload of that one completes
        (memory.md section 6).
        """
        if record.name in self.stuck:
            return
        names = set(record.placement.names)
        try:
            for name in reversed(record.placement.load):
                await self._triton.unload(name, record.id)
        except BackendTimeout:
            if record.state is ModelState.LOADING:  # it waits for that load to end
                self.give_up(record)
            raise
        if not (left := await self._triton.wait_gone(names, _NORMAL_SECONDS)):
            return
        is_dead = is_dead or any(map(self._has_lost_its_process, left))
        # also when it seems dead: its process may have ended in the ordinary way just now
        patience = _NORMAL_SECONDS if is_dead else self._limits.stall
        if left := await self._triton.wait_gone(left, patience):
            log.warning("model.unload_stalled", extra={"model_id": record.id, "names": left})
            await self._help_along(record, left, is_dead=is_dead)

    async def _help_along(self, record: ModelRecord, left: set[str], *, is_dead: bool) -> None:
        for name in map(TritonName, left):
            try:
                await self._triton.load(name, record.id)
            except AdapterError as error:
                if not is_dead:
                    raise _not_gone(record) from error
                # Its files are gone as well. Nothing of it is left but a line in Triton's index.
                reason = {"model_id": record.id, "reason": str(error)}
                log.warning("model.abandoned", extra=reason)
                left = left - {name}
                continue
            await self._triton.unload(name, record.id)
        if await self._triton.wait_gone(left, self._limits.unload / 2):
            raise _not_gone(record)

    def _has_lost_its_process(self, name: str) -> bool:
        return self._server is not None and self._server.has_live_stub(TritonName(name)) is False


def _not_gone(record: ModelRecord) -> BackendTimeout:
    return BackendTimeout(f"Triton does not let go of model {record.id!r}", model_id=record.id)
