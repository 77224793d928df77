"""What a store surely does not have is not asked for again for a few seconds, and nothing else."""

import pytest

from adapter.errors import ArtifactNotFound, StoreDenied, StoreUnavailable
from adapter.store.refusals import MAX_REMEMBERED, OF_KEYS, Refusals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("error", "seconds"), [(ArtifactNotFound("gone"), 5), (StoreDenied("no"), 1)]
)
def test_refusal_is_remembered_for_its_time(error, seconds):
    clock = Clock()
    refusals = Refusals(OF_KEYS, clock)
    refusals.remember(("a",), error)
    clock.now = seconds - 0.01
    with pytest.raises(type(error), match=str(error)):
        refusals.raise_known(("a",))
    refusals.raise_known(("b",))
    clock.now = seconds
    refusals.raise_known(("a",))
    assert not len(refusals)


def test_momentary_failure_is_never_remembered():
    refusals = Refusals(OF_KEYS)
    refusals.remember(("a",), StoreUnavailable("timed out"))
    assert not refusals.knows(("a",))


def test_oldest_refusals_are_forgotten_first():
    refusals = Refusals(OF_KEYS)
    for number in range(MAX_REMEMBERED + 10):
        refusals.remember((str(number),), ArtifactNotFound("gone"))
    assert len(refusals) == MAX_REMEMBERED == 1024
    assert not refusals.knows(("9",))
    assert refusals.knows(("10",))
