"""Faults of what ModelMesh is told and what is done for it, and of packages of several models."""

from adapter.control.loader import Loader
from adapter.control.models import ModelControl
from adapter.control.unloader import Unloader
from adapter.frontends.grpc.modelmesh import ModelRuntime
from adapter.frontends.grpc.modelmesh_sizes import MeshSizes
from tests.simulation.faults.fault import Fault

PLATFORMS = [
    Fault(
        "ModelMesh is told that all memory is free beside models",
        "it fills memory that others have, and each of its loads fails",
        ModelRuntime,
        "_purged",
        "return False",
        "return True",
    ),
    Fault(
        "a load of ModelMesh waits for no unload that is to come",
        "a load that its books allow is refused, and avoided for minutes",
        ModelRuntime,
        "_wait_for_slot",
        "await self._sizes.wait_for_evictions(self._told_seconds() / 2)",
        "pass",
        test="tests/frontends/grpc/modelmesh/test_full.py"
        "::test_a_load_that_waits_for_an_eviction_begins_when_the_model_is_gone",
    ),
    Fault(
        "ModelMesh is told all of the limit",
        "the baseline and one load of unknown size have no room",
        MeshSizes,
        "_promised",
        "return free - growth - min(strip, limit // _LARGEST_STRIP_SHARE)",
        "return limit",
    ),
    Fault(
        "modelSize does not wait for the measurement",
        "ModelMesh counts a guess for as long as the model is loaded",
        MeshSizes,
        "after_load",
        "return self._reported(model_id) if self._is_measured(model_id) else 0",
        "return self.default_bytes",
    ),
    Fault(
        "of a package the entry alone is unloaded",
        "its helpers stay in Triton, with their memory",
        Unloader,
        "_ask",
        "for name in reversed(record.placement.load):",
        "for name in record.placement.load[-1:]:",
    ),
    Fault(
        "the unload of a package waits for its entry alone",
        "its steps are still there when the unload is answered",
        Unloader,
        "unload",
        "names = frozenset(record.placement.names)",
        "names = frozenset({record.name})",
    ),
    Fault(
        "of a package the entry alone is loaded",
        "Python code calls models that Triton does not have",
        Loader,
        "_try",
        "for name in record.placement.load:",
        "for name in record.placement.load[-1:]:",
    ),
    Fault(
        "a load of V2 does not look whether the files have changed",
        "the old files are served, and the caller was told that the new ones are",
        ModelControl,
        "_replace",
        "if not await self._has_changed(known):",
        "if True:",
    ),
    Fault(
        "a load of V2 asks again at once while another is taken down",
        "it asks again and again until that is over",
        ModelControl,
        "join_load",
        "await asyncio.wait({load.task})",
        "pass",
        test="tests/control/models/test_joined_loads.py"
        "::test_a_failure_that_is_not_the_callers_is_waited_for_until_it_is_undone",
    ),
    Fault(
        "a load of V2 asks again at once while another waits for Triton to come back",
        "it holds the event loop for good",
        ModelControl,
        "join_load",
        "elif self.registry.returning(model_id) is not None:",
        "elif False:",
    ),
    Fault(
        "a load of V2 does not take the failure of another for its own",
        "callers that come together load a model that fails one after the other",
        ModelControl,
        "join_load",
        "if is_the_same and not isinstance(error, UnloadedMeanwhile):",
        "if False:",
    ),
    Fault(
        "a load of V2 is content with one that read older files",
        "the model is not the one that was there when the load was asked for",
        ModelControl,
        "_keep_or_update",
        "if replaces is not Replaces.OTHER_SOURCE and await self._has_changed(known):",
        "if False:",
    ),
]
