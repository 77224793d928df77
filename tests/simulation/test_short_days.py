"""Days of a few lines that show what the oracle sees of faults."""

from dataclasses import replace

import pytest

from tests.simulation.control import PlayedControl
from tests.simulation.faults import FAULTS
from tests.simulation.memory import MIB
from tests.simulation.models import Entry, Spec
from tests.simulation.plan import Plan, Settings, drawn
from tests.simulation.platforms import V2, Mesh
from tests.simulation.world import played

MODEL = Spec("a", 1, is_python=True, takes=100 * MIB, declared=None, grows=0, seconds=1.0)
MODELS = {
    "a": replace(MODEL, declared=MODEL.takes),
    "b": replace(MODEL, model_id="b", seconds=20.0),
    "y": replace(MODEL, model_id="y", steps=2, helpers=1),
    "z": replace(MODEL, model_id="z", helpers=2),
}
MESH = Mesh(load_concurrency=1, churn_seconds=3.0, tells_disk=True)
SETTINGS = Settings(
    memory_limit=None,
    reserve=0,
    loads_again=None,
    load_seconds=60.0,
    unload_seconds=40.0,
    warms_up=False,
    is_killed=False,
)
DAYS = {
    "of a package the entry alone is unloaded": (
        V2(),
        [(1, "load", "z", None), (20, "unload", "z", None)],
    ),
    "a load of V2 does not look whether the files have changed": (
        V2(),
        [(1, "load", "z", None), (20, "version", "z"), (25, "load", "z", None)],
    ),
    "modelSize does not wait for the measurement": (MESH, [(5, "use", "a", 1, None)]),
    "ModelMesh is told all of the limit": (MESH, [(5, "use", "a", 1, None)]),
}


def make_day(settings: Settings, entries: list) -> Plan:
    """Return a day of one shift on a small machine."""
    listed = tuple(Entry(0, at, verb, tuple(words)) for at, verb, *words in entries)
    day = replace(drawn(2), catalog=None, device_bytes=1000 * MIB, more_gpus=())
    day = replace(day, is_embedded=True, reader="host")
    return replace(day, models=MODELS, shifts=(settings,), entries=listed)


@pytest.mark.parametrize("fault", DAYS)
def test_day_is_right_unless_a_fault_is_planted(fault):
    platform, entries = DAYS[fault]
    day = make_day(replace(SETTINGS, platform=platform), entries)
    assert played(day).violation is None
    assert played(day, FAULTS[fault].build).violation is not None


def test_unkept_rule_is_counted_or_violated():
    """Models are loaded side by side on this day, and what one takes is a guess then."""

    def build(*parts):
        control = PlayedControl(*parts)
        control.unkept = {}
        return control

    day = drawn(1)
    outcome = played(day)
    assert outcome.violation is None
    assert outcome.differences["5 shared sizes"] > 0
    assert played(day, build).violation.rule == "5 shared sizes"
