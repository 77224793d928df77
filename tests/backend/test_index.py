"""The few names that are waited for, found in the bytes of Triton's repository index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from adapter.backend.index import in_state

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
    assert in_state(index(*entries), wanted, PRESENT) == truth & wanted


@pytest.mark.parametrize("size", [0, 50, 127, 128, 20_000, 3_000_000])
def test_an_entry_of_any_length_is_found(size):
    assert in_state(index(("m", "READY", "x" * size)), ["m"], PRESENT) == {"m"}


def test_a_model_whose_versions_differ_is_in_the_state_of_each():
    both = index(("m", "UNAVAILABLE", "unloaded"), ("m", "UNLOADING", ""))
    assert in_state(both, ["m"], PRESENT) == {"m"}


def test_a_text_that_looks_like_an_entry_never_hides_one():
    forged = pb.RepositoryIndexResponse()
    forged.models.add(name="m", version="1", state="UNAVAILABLE")
    text = forged.SerializeToString().decode()
    listed = index(("other", "UNAVAILABLE", text), ("m", "READY", ""), ("z", "READY", text))
    assert in_state(listed, ["m"], PRESENT) == {"m"}
