"""Two packages with the same names within answer right, whatever the order of loads and unloads."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.packages.models import (
    ask,
    names_in_triton,
    put,
    take_down,
    write_adding,
    write_calling,
    write_ensemble,
)
from tests.running import Client, RunningAdapter

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(600)]

# The number that each package adds to a value, times 11.
ADDS = {"one": 1, "two": 100}


def write_package(folder: Path, add: int) -> None:
    """Write an ensemble of a step and of code that calls a helper, with a name that may be free."""
    write_adding(folder / "helper", add)
    write_calling(folder / "caller", "helper")
    write_adding(folder / "step", 10 * add)
    write_ensemble(folder / "whole", "step", "caller")


@given(turns=st.permutations([*ADDS, *ADDS]))
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_packages_answer_right_in_any_order(
    adapter: RunningAdapter, client: Client, package: Path, turns: list[str]
) -> None:
    """Each turn loads the package, or unloads it if it is loaded."""
    for name, add in ADDS.items():
        client.delete(f"/models/{name}")  # an example before this one may have failed
        if not (package / name).exists():
            write_package(package / name, add)
    loaded: set[str] = set()
    for name in turns:
        if name in loaded:
            take_down(client, name)
            loaded.remove(name)
        else:
            put(client, name, package / name)
            loaded.add(name)
        assert {each: ask(client, each, 1) for each in loaded} == {
            each: [1 + 11 * ADDS[each]] for each in loaded
        }
        assert len(names_in_triton(adapter)) == 4 * len(loaded)
    assert not loaded
