"""A ModelMesh that is full: every first use is answered, whatever is known of the sizes."""

import pytest

from tests.journeys.modelmesh.full import Stage, in_order, shuffled

pytestmark = pytest.mark.triton


async def test_models_of_unknown_and_then_of_learned_size_are_answered(tmp_path):
    async with Stage(tmp_path, churn_seconds=3) as stage:
        names = stage.write("small", 6) + stage.write("large", 10, large=True)
        await stage.use(shuffled(names, seed=1))
        await stage.use(shuffled(names, seed=2)[:6])
    stage.check(answers=22)


async def test_models_of_declared_size_are_answered_in_each_round(tmp_path):
    async with Stage(tmp_path, churn_seconds=3) as stage:
        names = stage.write("large", 8, large=True, is_declared=True)
        for _ in range(2):
            await stage.use(names)
    stage.check(answers=16)


async def test_at_the_default_churn_age_nothing_fails_but_what_modelmesh_itself_refuses(tmp_path):
    async with Stage(tmp_path, churn_seconds=100, is_patient=False) as stage:
        names = in_order(stage.write("small", 4), stage.write("large", 8, large=True))
        await stage.use(names)
        while refused := stage.refused.copy():
            stage.refused.clear()
            stage.cache.age(100)
            await stage.use(refused)
    stage.check(answers=len(names))
