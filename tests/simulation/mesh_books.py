"""Check that ModelMesh may rely on the capacity and the sizes that it was told."""

from adapter.errors import AdapterError, CapacityError, ModelTooLarge, OutOfMemory
from tests.simulation.memory import MIB
from tests.simulation.models import Call, Spec, Violated

_SLACK_BYTES = 16 * MIB
# So long after a fault memory may be otherwise than the books of ModelMesh say: an unload that is
# slow, and the unloads and loads that have waited for it.
_UPSET_SECONDS = 100.0
_UPSETS = (
    "strangers",
    "unread",
    "unload",
    "remove",
    "load",
    "answer",
    "end",
    "hang",
    "stub ended",
    "restart",
)
# Within which ModelMesh has unloaded others for a load that took more than was predicted: it asks
# modelSize, for 20 s at most, and requests in flight have their time.
_EVICTED_SECONDS = 60.0
_WAITS_SECONDS = 15.0  # a load waits for an unload that ModelMesh sends late
_AT_ONCE_SECONDS = 10.0  # a warm-up takes some
_GROWTH_SHARE = 50  # of the limit, at least: by so much Triton itself may grow


class MeshOracle:
    """Keeps the books of a ModelMesh, and judges the adapter by them."""

    def __init__(self, world: object) -> None:
        self._world = world
        self._sizes: dict[str, int] = {}  # as ModelMesh counts them, by model
        self._tries: set[str] = set()  # urls whose loads may take more than ModelMesh has free
        self._unknown: set[str] = set()  # urls whose size the adapter cannot know
        self._alone: set[str] = set()  # loads that have nothing to wait for
        self._over_since: float | None = None
        self._baseline = 0
        self._is_guessed = False  # the capacity, which is more than there is

    def began(self, capacity: int) -> None:
        """ModelMesh is told its capacity: all memory counts as free."""
        world = self._world
        held = {held.name for held in world.all_held() if held.state == "READY"}
        if left := sorted(held - world.stuck_names()):
            raise Violated("2 purge", f"ModelMesh was told that all is free, beside {left}")
        self._baseline = world.truth.held["baseline"]
        most = world.oracle.limit - self._baseline
        self._is_guessed = capacity > most
        if self._is_guessed and world.reader.can_be_read:
            raise Violated("3 capacity", f"{capacity} bytes were told, of {most}")
        world.truth.watch = self.looked

    def leave(self) -> None:
        self._world.truth.watch = lambda: None

    # -- what ModelMesh counts ----------------------------------------------------------------

    def predicted(self, model_id: str, size: int) -> None:
        self._sizes[model_id] = size

    def last(self, model_id: str) -> int:
        return self._sizes.get(model_id, 0)

    def begins(self, call: Call, spec: Spec) -> None:
        oracle = self._world.oracle
        if self.last(spec.model_id) < spec.takes:
            self._tries.add(spec.url)
        if oracle.is_known(spec):
            self._unknown.discard(spec.url)
        else:
            self._unknown.add(spec.url)
        has_room = oracle.surely_fits(call, spec) and not self._world.arriving()
        self._alone = {spec.url} if has_room else set()

    def loaded(self, call: Call, spec: Spec) -> None:
        """A load for which there is room, and none beside it, waits for nothing."""
        took, had_room = self._world.now - call.begun, spec.url in self._alone
        is_late = took > 2 * spec.seconds + _AT_ONCE_SECONDS
        if had_room and is_late and not self._is_upset():
            raise Violated("2 in time", f"{spec.model_id} had room, and waited {took:.0f} s")

    def note_size(self, spec: Spec, size: int, since: float) -> None:
        """ModelMesh is told what a loaded model takes; 0: that is measured yet."""
        if not size:
            return
        self._sizes[spec.model_id] = size
        world, upset = self._world, ("unread", "stub ended", "end", "unload asked")
        is_read = world.reader.kind == "host" and not world.oracle.since(since - 5.0, *upset)
        if is_read and spec.is_python and size < spec.takes * 0.9 - _SLACK_BYTES:
            said = f"{spec.model_id} takes {spec.takes // MIB} MiB, and {size // MIB} were told"
            raise Violated("5 told sizes", said)

    # -- rules 2 and 3 ------------------------------------------------------------------------

    def refused(self, call: Call, error: AdapterError, spec: Spec) -> None:
        """A load that the books of ModelMesh allow was refused: not for memory, where they were
        right.
        """
        if not isinstance(error, CapacityError | ModelTooLarge):
            return
        if self._is_guessed and isinstance(error, OutOfMemory):
            return  # nothing is measured: what Triton itself takes was in the capacity
        if not error.was_tried and spec.url in self._unknown and not self._is_upset():
            self._nothing_left(call, spec)
        has_waited = self._world.now - call.begun >= _WAITS_SECONDS  # as long as is promised
        if not has_waited and not self._is_upset() and not self._are_books_short(spec):
            said = f"the load of {call.model_id} fits the books of ModelMesh: {error!r}"
            raise Violated("3 told capacity", said)

    def _nothing_left(self, call: Call, spec: Spec) -> None:
        """A load of unknown size is tried for as long as anything is left below the limit."""
        oracle, world = self._world.oracle, self._world
        others = sum(oracle.most(p) for p in oracle.present.values() if p != spec)
        used = max(world.truth.held["baseline"] + others, world.truth.most_since(call.begun - 20.0))
        if used < oracle.limit - _SLACK_BYTES and world.reader.kind != "off":
            left = (oracle.limit - used) // MIB
            raise Violated("3 told capacity", f"{spec.model_id} is not tried with {left} MiB left")

    def _is_upset(self) -> bool:
        oracle, world = self._world.oracle, self._world
        has_leaked = world.truth.held["baseline"] - self._baseline
        return (
            oracle.since(world.now - _UPSET_SECONDS, *_UPSETS)
            or has_leaked > oracle.limit // _GROWTH_SHARE
            or "strangers" in world.truth.held
            or self._ends_a_load()
        )

    def _ends_a_load(self) -> bool:
        """Return whether a model is unloaded amid its load: Triton frees it after the load."""
        oracle, arriving = self._world.oracle, self._world.arriving()
        begun = self._world.now - _UPSET_SECONDS
        return any(oracle.since(begun, "unload asked", model_id=h.spec.model_id) for h in arriving)

    def _are_books_short(self, spec: Spec) -> bool:
        """Whether ModelMesh counts less for a model than that takes, or has taken."""
        present = {held.spec.model_id: held for held in self._world.all_held()}
        others = {held.spec for held in present.values()} | {spec}
        is_short = any(self.last(each.model_id) < each.takes for each in others)
        if spec.version > 1 and self.last(spec.model_id) < (spec.declared or 0):
            return True  # ModelMesh was told the size of older files
        return is_short or any(map(self._grown, present.values()))

    def _grown(self, held: object) -> int:
        return max(0, self._world.bytes_of(held) - held.spec.takes)

    def looked(self) -> None:
        """Memory has changed: above the limit there is one load at most that ModelMesh could not
        make room for, and not for long.
        """
        world = self._world
        if world.reader.kind == "off" or self._is_upset():
            self._over_since = None
            return
        held = world.all_held()
        used = self._baseline + sum(world.bytes_of(h) - self._grown(h) for h in held)
        over = used - world.oracle.limit - _SLACK_BYTES
        if over <= 0:
            self._over_since = None
            return
        self._over_since = world.now if self._over_since is None else self._over_since
        allowed = max((h.spec.takes for h in held if h.spec.url in self._tries), default=0)
        seconds = world.now - self._over_since
        if over > allowed or seconds > _EVICTED_SECONDS:
            said = f"{over // MIB} MiB above the limit for {seconds:.0f} s, by {allowed // MIB}"
            world.violate(Violated("3 limit", said))
