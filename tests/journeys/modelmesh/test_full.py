"""A ModelMesh that is full: every first use is answered, whatever is known of the sizes."""

import pytest

from tests.journeys.modelmesh.full import Stage, shuffled

pytestmark = pytest.mark.triton


async def test_models_of_unknown_and_then_of_learned_size_are_answered(tmp_path):
    async with Stage(tmp_path, churn_seconds=3) as stage:
        names = stage.write("small", 4) + stage.write("large", 8, large=True)
        await stage.use(shuffled(names, seed=1))
        await stage.use(shuffled(names, seed=2)[:4])
    stage.check(answers=16)


async def test_models_of_declared_size_are_answered_in_each_round(tmp_path):
    async with Stage(tmp_path, churn_seconds=3) as stage:
        names = stage.write("large", 7, large=True, is_declared=True)
        for _ in range(2):
            await stage.use(names)
    stage.check(answers=14)
