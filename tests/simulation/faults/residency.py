"""Faults of models that calls load, and of the disk cache."""

from adapter.control.residency import eviction
from adapter.control.residency.engine import Residency
from adapter.control.residency.updater import Updater
from adapter.core.limits import Oversize
from adapter.core.residency import victims
from adapter.store.cache import ArtifactCache
from adapter.store.disk import Disk
from adapter.store.fetching import Fetch
from adapter.store.refusals import Refusals
from tests.simulation.faults.fault import Fault

RESIDENCY = [
    Fault(
        "a model that seems to take nothing is never evicted",
        "what was measured beside others keeps all memory, and every load is refused",
        victims,
        "choose_victims",
        "return fewest(might_free or seem_empty, _missing(figures))",
        "return fewest(might_free, _missing(figures))",
        test="tests/unit/core/residency/test_victims.py"
        "::test_one_that_seems_to_take_nothing_goes_where_no_other_can",
    ),
    Fault(
        "a pinned model is evicted",
        "a model that only others call is gone",
        eviction,
        "retention_reason",
        "if is_pinned:",
        "if False:",
    ),
    Fault(
        "what a platform has loaded is evicted",
        "the platform calls a model that it believes to be loaded",
        eviction,
        "retention_reason",
        "if not record.is_on_demand:",
        "if False:",
    ),
    Fault(
        "a model that is called amid the unloads of idle ones goes with them",
        "the next call loads it again",
        eviction.Eviction,
        "evict",
        "return known.usage.used_at <= unused_since and",
        "return",
    ),
    Fault(
        "the files of a model that was lost stay in use",
        "the disk fills with models that are not loaded",
        Residency,
        "_release",
        "for artifact in files.taken():",
        "for artifact in ():",
    ),
    Fault(
        "the files of a new version that is not loaded stay in use",
        "each one leaves files on the disk for good",
        Updater,
        "_give_up",
        "if newer is not None:",
        "if False:",
    ),
    Fault(
        "a call waits for as long as its model takes",
        "callers hang behind a store that is slow",
        Residency,
        "_served",
        "await asyncio.wait({task}, timeout=left)",
        "await asyncio.wait({task})",
    ),
    Fault(
        "a download that is cut is taken for whole",
        "Triton loads half a model",
        Fetch,
        "_download_to",
        "if done == file.size_bytes:",
        "if done:",
    ),
    Fault(
        "a folder that changes amid its fetch is kept",
        "config and weights are of two versions, which the store never had together",
        ArtifactCache,
        "_fetch_once",
        "if version.is_folder and await self._asked_again(store, version) != version.etag:",
        "if False:",
    ),
    Fault(
        "a fetch that fails leaves its folder",
        "the disk fills with parts of models",
        ArtifactCache,
        "_dropped",
        "await CACHE.run_to_end(self._folder.drop, work)",
        "pass",
    ),
    Fault(
        "a fetch that fails keeps its room",
        "the cache seems full, and holds nothing",
        ArtifactCache,
        "_dropped",
        "reservation.settle(0)",
        "pass",
    ),
    Fault(
        "the cache counts a file that it has removed",
        "with each eviction there is less room",
        Disk,
        "take",
        "self.used_bytes -= leaving.cached.note.size_bytes",
        "pass",
    ),
    Fault(
        "files in use leave the disk",
        "a model cannot be loaded again, or is loaded by halves",
        Disk,
        "hold",
        "cached.pins += 1",
        "pass",
    ),
    Fault(
        "a store that refused once refuses for good",
        "a model is refused after its permissions were mended",
        Refusals,
        "known",
        "if self._clock() < until:",
        "if True:",
    ),
    Fault(
        "a package that was too large once is so for a day",
        "what strangers took is held against the model, after they have gone",
        Oversize,
        "proven",
        "> booked.limit_bytes:",
        "> 0:",
        test="tests/unit/core/test_limits.py"
        "::test_what_was_too_large_beside_others_that_have_left_is_tried_once_more",
    ),
]
