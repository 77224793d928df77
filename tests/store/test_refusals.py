"""What a store surely does not have is not asked for again for a few seconds, and nothing else."""

from adapter.errors import ArtifactNotFound
from adapter.store.refusals import MAX_REMEMBERED, OF_KEYS, Refusals


def test_oldest_refusals_are_forgotten_first():
    refusals = Refusals(OF_KEYS)
    for number in range(MAX_REMEMBERED + 10):
        refusals.remember((str(number),), ArtifactNotFound("gone"))
    assert len(refusals) == MAX_REMEMBERED == 1024
    assert not refusals.knows(("9",))
    assert refusals.knows(("10",))
