"""Models that are seen for the first time, against a limit that nobody but the adapter holds."""

from collections.abc import Iterator

import grpc
import pytest

from adapter._proto import model_runtime_pb2 as mmesh
from tests.constants import UNLOAD
from tests.journeys.memory.models import MIB, check_agreement, tree_bytes, write_eater
from tests.running import COMPLETE, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

# small: a kernel in a virtual machine takes seconds to hand out a GiB
_LIMIT = 512 * MIB
_FLAGS = ("--memory-source=host", "--memory-limit=512MiB")
_MODEL_MIB = 110
# in the first refusal of a package that passed the limit
_UNDONE = "and was unloaded"
# in the next one: its size was measured if the load had ended before it was found too large
_LEARNED = ("needs more than", "(measured)")


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    with embedded_adapter(*_FLAGS, COMPLETE, f"--model-roots={root}") as adapter:
        yield adapter


def test_of_five_models_only_those_stay_that_fit(adapter, client, root):
    replies = []
    for name in "abcde":
        package = write_eater(root / name, _MODEL_MIB, imports=f"#{name}")
        replies.append(client.load(name, package))

    refused = [reply.json() for reply in replies if reply.status != 200]
    assert 1 <= len(refused) <= 2
    assert {reply.status for reply in replies} == {200, 507}
    assert {body["code"] for body in refused} == {"InsufficientMemory"}
    assert tree_bytes(adapter) < _LIMIT
    check_agreement(adapter)


def names_learned_size(error: str) -> bool:
    return any(text in error for text in _LEARNED)


def test_load_that_took_too_much_needs_more_afterwards(adapter, client, root):
    """If it was ended before it was over, nobody has seen how much it would have taken."""
    client.load_model("first", write_eater(root / "first", 334))
    beside = write_eater(root / "beside", 174)

    tried = client.load("beside", beside)
    again = client.load("beside", beside)

    for reply in (tried, again):
        body = reply.json()
        assert (reply.status, body["code"]) == (507, "InsufficientMemory"), body
        assert body["limit_bytes"] == _LIMIT
    # less than 194 MiB if the load is ended before it is over
    seen_bytes = tried.json()["needed_bytes"]
    assert 130 * MIB < seen_bytes < 214 * MIB
    # another reading may have been larger before the load was gone
    assert seen_bytes <= again.json()["needed_bytes"] <= 2.2 * seen_bytes
    assert _UNDONE in tried.error
    assert names_learned_size(again.error)
    check_agreement(adapter)

    client.unload_model("first")
    client.load_model("beside", beside)


def test_model_larger_than_all_memory_never_fits(adapter, client, root):
    """The load may be ended as soon as it has passed the limit. Nothing is forgotten of that."""
    package = write_eater(root / "alone", 530)
    seen_bytes = 0
    for _ in range(2):
        reply = client.load("alone", package)
        body = reply.json()
        assert (reply.status, body["code"]) == (400, "ModelTooLarge"), body
        assert max(seen_bytes, 0.9 * _LIMIT) <= body["needed_bytes"] < 605 * MIB
        seen_bytes = body["needed_bytes"]
    check_agreement(adapter)


def test_mesh_may_try_an_unmeasured_load_again(adapter, client, root):
    with grpc.insecure_channel(adapter.grpc) as channel:
        mesh = channel.unary_unary(
            "/mmesh.ModelRuntime/loadModel",
            request_serializer=mmesh.LoadModelRequest.SerializeToString,
        )
        client.load_model("first", write_eater(root / "held", 360))

        by_mesh = write_eater(root / "by-mesh", 134)
        refusals = []
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                mesh(mmesh.LoadModelRequest(modelId="x", modelPath=str(by_mesh)), timeout=60)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            refusals.append(caught.value.details())
        assert _UNDONE in refusals[0]
        # a size that nobody measured is no reason to refuse ModelMesh a second try
        assert _UNDONE in refusals[1] or "(measured)" in refusals[1]
    check_agreement(adapter)


# to 0.9 GiB, and stays there until it is ended
_GROWS_AT_IMPORT = """
import time
HELD = []
for _ in range(50):
    HELD.append(numpy.ones(18 * 2**20, numpy.uint8))
    time.sleep(0.1)
time.sleep(3600)
"""


@pytest.mark.nightly
def test_load_ended_during_completion_stays_in_triton(tmp_path):
    """One of Triton's threads for loads is stuck from there on."""
    package = write_eater(tmp_path / "early", 1, imports=_GROWS_AT_IMPORT)
    with (
        embedded_adapter(*_FLAGS, f"--model-roots={tmp_path}", constants={UNLOAD: 6}) as adapter,
        adapter.client() as client,
    ):
        client.load_model("small", write_eater(tmp_path / "tiny", 18))
        ended, refused = (client.load("early", package).json() for _ in range(2))
        for body in (ended, refused):
            assert body["code"] in {"InsufficientMemory", "ModelTooLarge"}, body
        assert _UNDONE in ended["error"]
        # it had passed the limit alone, or together with the others
        assert "no unload can" in refused["error"] or names_learned_size(refused["error"])
        adapter.wait_for("model.load_stuck", model_id="early")
        assert client.invoke("small", 1.5).status == 200
        check_agreement(adapter, stuck=["early"])
