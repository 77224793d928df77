"""The few names that are waited for, found in the bytes of Triton's repository index."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from adapter.triton.client import SharedIndex, select_in_state

PRESENT = {"READY", "LOADING", "UNLOADING"}
STATES = st.sampled_from(["READY", "LOADING", "UNLOADING", "UNAVAILABLE", ""])
NAMES = st.sampled_from(["a", "m", "mm", "m1", "ü" * 70, "n" * 200])


def index(*entries: tuple[str, str, str]) -> bytes:
    listed = pb.RepositoryIndexResponse()
    for name, state, reason in entries:
        listed.models.add(name=name, version="1", state=state, reason=reason)
    return listed.SerializeToString()


@given(st.lists(st.tuples(NAMES, STATES, st.text(max_size=300))), st.sets(NAMES))
def test_it_finds_what_protobuf_finds(entries, wanted):
    truth = {name for name, state, _ in entries if state in PRESENT}
    assert select_in_state(index(*entries), wanted, PRESENT) == truth & wanted


@pytest.mark.parametrize("size", [0, 50, 127, 128, 20_000, 3_000_000])
def test_an_entry_of_any_length_is_found(size):
    assert select_in_state(index(("m", "READY", "x" * size)), ["m"], PRESENT) == {"m"}


def test_text_like_an_entry_hides_none():
    forged = pb.RepositoryIndexResponse()
    forged.models.add(name="m", version="1", state="UNAVAILABLE")
    text = forged.SerializeToString().decode()
    listed = index(("other", "UNAVAILABLE", text), ("m", "READY", ""), ("z", "READY", text))
    assert select_in_state(listed, ["m"], PRESENT) == {"m"}


class Calls:
    """`begun` has a future for each call of `ask`, to be given its answer."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[asyncio.Future[bytes]] = asyncio.Queue()

    async def ask(self) -> bytes:
        answer = asyncio.get_running_loop().create_future()
        self.begun.put_nowait(answer)
        return await answer


async def test_callers_of_index_share_next_answer():
    calls = Calls()
    listing = SharedIndex(calls.ask)
    first = asyncio.create_task(listing.read())
    first_call = await calls.begun.get()
    others = [asyncio.create_task(listing.read()) for _ in range(20)]
    await asyncio.sleep(0)

    first_call.set_result(b"old")
    assert await first == b"old"
    second_call = await calls.begun.get()
    later = asyncio.create_task(listing.read())
    await asyncio.sleep(0)
    second_call.set_result(b"new")
    assert await asyncio.gather(*others) == [b"new"] * 20

    (await calls.begun.get()).set_result(b"newest")
    assert await later == b"newest"
    assert calls.begun.empty()


async def test_one_that_leaves_takes_the_index_from_nobody():
    calls = Calls()
    listing = SharedIndex(calls.ask)
    leaving, staying = (asyncio.create_task(listing.read()) for _ in range(2))
    call = await calls.begun.get()

    leaving.cancel()
    call.set_result(b"index")

    assert await staying == b"index"
    assert leaving.cancelled()


async def test_index_failure_is_only_for_who_waited():
    calls = Calls()
    listing = SharedIndex(calls.ask)
    both = [asyncio.create_task(listing.read()) for _ in range(2)]
    call = await calls.begun.get()
    after = asyncio.create_task(listing.read())
    await asyncio.sleep(0)

    call.set_exception(OSError("gone"))
    assert [type(e) for e in await asyncio.gather(*both, return_exceptions=True)] == [OSError] * 2
    (await calls.begun.get()).set_result(b"back")

    assert await after == b"back"
