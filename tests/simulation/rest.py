"""Check at quiet moments, when nothing is in progress, that all books agree with the truth."""

from adapter.core.memory import total
from tests.simulation.control import Control, KnownModel
from tests.simulation.memory import MIB
from tests.simulation.models import Violated
from tests.simulation.triton import LOAD_THREADS

SLACK_BYTES = 16 * MIB
# So long ago a fault may have happened that a failure is still due to.
RECENT_SECONDS = 20.0
OOM = "out of memory"


class Rest:
    """A part of the oracle, for rules 5 and 7."""

    def rest(self, control: Control) -> None:
        """Nothing is under way any more: all books agree with the truth."""
        models = [model for model in self._world.known_models() if model.state != "STUCK"]
        known = {model.id: model for model in models}
        self._idle(control, models)
        self._not_stuck()
        self._same(models, self._world.stuck_names())
        self._came_back(known)
        for model_id in self.serving:
            if model_id not in known:
                raise Violated("5 desired", f"{model_id} was loaded, and is not any more")
        if self._world.has_reservations(control):
            raise Violated("5 ledger", "bytes stay reserved, and no load is in progress")
        for device, shown in control.state.devices().items():
            owners = [model.record for model in self._world.known_models()]
            held = sum(control.state.held(owner).get(device, 0) for owner in owners)
            booked = shown.used_by_models_bytes + shown.reserved_bytes
            if booked != held:
                text = f"on {device} {booked} bytes are booked, models have {held}"
                raise Violated("5 ledger", text)
        self._near_the_truth(control)
        self._free_is_free(control)
        if self._world.story.bugs:
            raise Violated("7 bugs", self._world.story.bugs[0])

    def _idle(self, control: Control, models: list[KnownModel]) -> None:
        endless = self.endless_loads()
        if (pending := control.state.pending_operations) > len(endless):
            raise Violated("5 left over", f"{pending} operations never end")
        for model in models:
            if model.requests:
                raise Violated("5 left over", f"{model.id} has {model.requests} leases")
            if model.state not in {"READY", "DEAD"} and model.id not in endless:
                raise Violated("5 left over", f"{model.id} is {model.state}")

    def endless_loads(self) -> set[str]:
        """Return the models that Triton loads for ever; an unload of one is never answered by a
        Triton whose processes the adapter cannot end.
        """
        if self._world.is_embedded:
            return set()
        return {held.spec.model_id for held in self._world.arriving() if held.never_ends}

    def _same(self, models: list[KnownModel], stuck: set[str]) -> None:
        world = self._world
        names = {name for model in models for name in model.names}
        served = {name for model in models if model.state == "READY" for name in model.names}
        has = {held.name for held in world.all_held() if held.state == "READY"}
        if missing := served - has:
            raise Violated("5 left over", f"Triton does not have {sorted(missing)}")
        if extra := has - names - stuck:
            raise Violated("5 left over", f"Triton has {sorted(extra)}, which no model is")
        extra = set(world.disk.folders) - names - stuck
        if extra and not self.since(self._shift_begun, "remove", "place"):
            raise Violated("5 left over", f"folders stay: {sorted(extra)}")
        if world.is_embedded:
            run = {each.name for each in world.triton.processes.all if each.is_real}
            if extra := run - names - stuck:
                raise Violated("5 left over", f"processes stay: {sorted(extra)}")

    def _not_stuck(self) -> None:
        """Nothing is stuck but what Triton still loads, or where the adapter cannot see processes
        unloads for ever; and never all of its threads.
        """
        goes_on = {"LOADING"} if self._world.is_embedded else {"LOADING", "UNLOADING"}
        stuck = self._world.known_models("STUCK")
        for model in stuck:
            held = map(self._world.triton.held, model.names)
            if goes_on.isdisjoint(each.state for each in held if each is not None):
                said = f"{model.name} counts as stuck, and Triton is done with it"
                raise Violated("5 left over", said)
        if self._world.is_embedded and len(stuck) >= LOAD_THREADS:
            raise Violated("5 left over", "all load threads are stuck, and Triton is not restarted")

    def _came_back(self, known: dict[str, KnownModel]) -> None:
        """Check that models come back that Triton has lost, where the adapter loads them again."""
        upset = ("load", "prepare", "place", "confirm", "answer", OOM, "stub ended")
        recent, room = self._first_end - RECENT_SECONDS, min(self.limits) * 0.8
        names = [name for name in self.present if self.since(recent, "load asked", model_id=name)]
        others = {name: self.present[name] for name in names} | self._lost
        # models that were lost together fit again on a single device
        has_fitted = others == self._lost and len(self.limits) == 1
        is_full = not has_fitted and sum(map(self.most, others.values())) > room
        comes_back = self.settings.loads_again or self.since(self._shift_begun, "restart")
        is_full = is_full or self.since(self._first_end, "strangers")
        if not comes_back or is_full or self._ends > 2:
            return
        for model_id, spec in self._lost.items():
            if 2 * spec.seconds * len(spec.parts()) > self.settings.load_seconds:
                continue  # its load may take longer than it may
            if any(self.since(recent, each) for each in upset):
                continue
            if model_id in known and known[model_id].state == "READY":
                continue
            raise Violated("5 desired", f"{model_id} was lost with Triton, and is not back")

    def _near_the_truth(self, control: Control) -> None:
        """Check what is booked of models with processes of their own."""
        if self._world.reader.kind != "host":
            return
        models = self._world.known_models("READY", "DEAD")
        if not all(model.id in self.loaded_alone for model in models):
            return  # what one of them has too little of, another one may have too much of
        for model in models:
            held = self._world.triton.held(model.name)
            if held is None or held.process.over.is_set() or not held.spec.is_python:
                continue
            # Triton went on with a failed unload beside the next load: both were measured
            was_unloading = self.since(self._shift_begun, "unload", model_id=model.id)
            if was_unloading or not control.state.size_of(model.record).is_measured:
                continue
            booked = total(control.state.held(model.record))
            real = sum(map(self._world.bytes_of, self._world.held_of(model.id)))
            most = held.spec.package.takes + held.spec.grows
            loaded = min(real, held.spec.package.takes)  # growth need not be booked
            # memory of no model may count as that of the model loaded next
            most = most * 1.1 + SLACK_BYTES + max(0, self.kept.get(model.id, 0))
            if not loaded * 0.9 - SLACK_BYTES <= booked <= most:
                said = f"{model.id} has {booked // MIB} MiB, and takes {real // MIB}"
                raise Violated("5 ledger", said)

    def _free_is_free(self, control: Control) -> None:
        """Check that nothing which is in use counts as free, whoever has it."""
        reader, truth = self._world.reader, self._world.truth
        if reader.kind not in {"host", "nvml"} or reader.last is None:
            return
        devices = control.state.devices(reader.last)
        for number, device in enumerate(reader.last.devices):
            free = devices[device].free_bytes
            left = devices[device].limit_bytes - truth.used_on(number)
            if free > max(0, left) + SLACK_BYTES:
                text = f"{free // MIB} MiB count as free on {device}, where {left // MIB} are left"
                raise Violated("5 ledger", text)
