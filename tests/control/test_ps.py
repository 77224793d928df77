"""`triton-adapter ps` before an adapter with a thousand models."""

import asyncio
import os
import resource
import sys

import pytest

from tests.control.admin import admin_of, adopt
from tests.fakes.house import House

# what costs more to import than all of the rest of `ps` takes
HEAVY = {"aiohttp", "asyncio", "grpc", "numpy", "prometheus_client", "rich", "shtab", "uvloop"}


async def ps(house: House, *flags: str) -> tuple[str, str, float]:
    """Return stdout, stderr and the CPU time of the command."""
    async with admin_of(house) as admin:
        before = _cpu_seconds()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *flags, "-m", "adapter", "ps"),
            env={**os.environ, "ADAPTER_ADMIN": f"127.0.0.1:{admin.port}"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err
    return out.decode(), err.decode(), _cpu_seconds() - before


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
async def test_a_thousand_models_cost_ps_no_more_than_its_start_does():
    few, many = await House(limit=1000).open(), await House(limit=1000).open()
    adopt(few, 1)
    names = adopt(many, 1000)
    least = min([(await ps(few))[2] for _ in range(3)])
    out, _, _ = first = await ps(many)
    models = out.partition("\n\n")[2]
    assert [line.split()[0] for line in models.splitlines()] == ["NAME", *names]
    assert min(first[2], (await ps(many))[2]) < 2 * least


@pytest.mark.slow
async def test_ps_shows_the_gpu_that_a_model_was_put_on():
    house = await House(gpus={0: 500, 1: 1000}).open()
    for name in ("a", "b"):
        house.packages.declared[f"/{name}"] = house.sizes[name] = 400
    house.packages.gpus["/b"] = frozenset({0})
    await house.load("a")
    await house.load("b")
    out, _, _ = await ps(house)
    title, *rows = out.partition("\n\n")[2].splitlines()
    assert title.split()[-1] == "GPU"
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [("a", "1"), ("b", "-")]
    await house.close()


@pytest.mark.slow
async def test_ps_imports_nothing_heavy():
    _, err, _ = await ps(await House(limit=1000).open(), "-X", "importtime")
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert "adapter.cli.client" in imported
    assert imported & HEAVY == set()
