"""A full ModelMesh: unknown, learned and declared sizes, with and without churn, and eight callers
at once of eight times as many models as fit.
"""

import pytest

from tests.journeys.modelmesh.full import Stage, shuffled

pytestmark = [pytest.mark.triton, pytest.mark.nightly, pytest.mark.timeout(3600)]
ROUNDS = 5


async def test_five_rounds_of_mixed_models_are_answered(tmp_path):
    async with Stage(tmp_path, churn_seconds=3) as stage:
        names = stage.write("small", 18) + stage.write("large", 30, large=True)
        for seed in range(ROUNDS):
            await stage.use(shuffled(names, seed=seed))
    stage.check(answers=ROUNDS * 48)


async def test_models_of_declared_size_are_answered(tmp_path):
    async with Stage(tmp_path, churn_seconds=3) as stage:
        names = stage.write("large", 10, large=True, is_declared=True)
        for _ in range(ROUNDS * 3):
            await stage.use(names)
    stage.check(answers=ROUNDS * 30)


async def test_with_the_default_churn_age_only_modelmesh_refuses(tmp_path):
    async with Stage(tmp_path, churn_seconds=100, is_patient=False) as stage:
        names = stage.write("small", 18) + stage.write("large", 30, large=True)
        for seed in range(ROUNDS):
            await stage.use(shuffled(names, seed=seed))
            stage.cache.age(100)
    assert stage.tally.churned == len(stage.refused)
    stage.check(answers=ROUNDS * 48 - stage.tally.churned)


@pytest.mark.parametrize("default_size", ["1MB", "64MiB"])
async def test_eight_callers_of_forty_models_are_answered(tmp_path, default_size):
    """ModelMesh books a load when it is queued: what was predicted for eight loads must not evict
    those that are loading. Models take some 170 MiB, more than both defaults, and there is room
    for five. With a default of 200 MiB eight loads do not fit, and ModelMesh answers hardly any.
    """
    flags = ("--load-concurrency=2", f"--modelmesh-default-size={default_size}")
    async with Stage(tmp_path, *flags, memory_limit="1200MiB", churn_seconds=0) as stage:
        names = stage.write("large", 40, large=True)
        await stage.use_at_random(names, calls=530, callers=8, seed=1)
    stage.check_share(answers=500, failed_share=0.02)
