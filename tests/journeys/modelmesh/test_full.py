"""Eight callers of a full ModelMesh; tests/nightly/test_modelmesh_full.py has the long form."""

import pytest

from tests.journeys.modelmesh.full import Stage

pytestmark = pytest.mark.triton


@pytest.mark.slow
async def test_eight_callers_of_full_modelmesh_are_answered(tmp_path):
    """ModelMesh books a load when it is queued: predictions for eight loads must not evict those
    that are loading. There is room for five models.
    """
    flags = ("--load-concurrency=2",)
    async with Stage(tmp_path, *flags, memory_limit="1200MiB", churn_seconds=0) as stage:
        names = stage.write("large", 40, large=True)
        await stage.use_at_random(names, calls=60, callers=8, seed=1)
    stage.check_share(answers=57, failed_share=0.05)
