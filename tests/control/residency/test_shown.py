"""What `ps` and /debug/state say of the models that calls load."""

import asyncio

import pytest
from adapter.control.residency import Options
from tests.control.admin import admin_of, ps_before
from tests.fakes.residence import Residence

from adapter.cli.models import ModelTable


@pytest.fixture
async def residence():
    residence = await Residence(2, Options(pin=("a",))).open("a", "b", "c", "d")
    yield residence
    await residence.close()


async def ps(residence: Residence) -> list[str]:
    return await ps_before(residence.house)


async def test_ps_shows_what_is_fetched_pinned_and_evicted(residence):
    for name in "abc":
        await residence.call(name)
    gate = residence.steps.hold("fetch d")
    call = residence.house.begin(residence.call("d"))
    await gate.reached.wait()
    progress = residence.control.registry.find("d").files.progress
    progress.done_bytes, progress.total_bytes = 41, 100
    _, *lines = await ps(residence)
    assert [" ".join(line.split()[:3]) for line in lines[:3]] == [
        "a READY, pinned",
        "c READY 100.0",
        "d FETCHING 41",
    ]
    *lines, evicted = lines
    assert evicted.startswith("evicted last: b, for 'c': 1 call x 0.1 s / 0.10 GiB, last called ")
    assert lines[-1] == "on disk: 3, 30 bytes of 1000 bytes"
    gate.open()
    await call


async def test_ps_says_that_a_disk_has_no_room(residence):
    residence.artifacts.limit_bytes = 0
    assert (await ps(residence))[-1] == "on disk: 0, the disk has no room for any"


async def test_ps_goes_on_watching_while_a_model_is_fetched(residence):
    await residence.call("a")
    gate = residence.steps.hold("fetch b")
    call = residence.house.begin(residence.call("b"))
    await gate.reached.wait()
    table = ModelTable()
    async with admin_of(residence.house) as admin:
        for _ in range(2):
            state = await (await admin.get("/debug/state")).json()
            head, _, coming, *_ = table.format(state)
    gate.open()
    await call
    assert head.split()[-1] == "REQ/S"
    assert coming.split()[:2] == ["b", "FETCHING"]


async def test_the_state_says_who_waits_for_what(residence):
    gate = residence.steps.hold("load a")
    calls = [residence.house.begin(residence.call("a")) for _ in range(2)]
    await gate.reached.wait()
    async with admin_of(residence.house) as admin:
        found = (await (await admin.get("/debug/state")).json())["on_demand"]
    assert found == {
        "on_disk": {"models": 0, "bytes": 0},
        "disk": {
            "models": 1,
            "bytes": 10,
            "fetching_bytes": 0,
            "undeleted_bytes": 0,
            "free_bytes": 990,
            "limit_bytes": 1000,
        },
        "waiting": 2,
        "evictions": {},
        "models": [
            {
                "model_id": "a",
                "key": "a",
                "state": "LOADING",
                "percent": 100,
                "done_bytes": 10,
                "total_bytes": 10,
                "waiting": 2,
                "is_pinned": True,
                "is_outdated": False,
            }
        ],
    }
    gate.open()
    await asyncio.gather(*calls)
