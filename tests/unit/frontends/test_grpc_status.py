"""What an error is called in gRPC."""

from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter import errors
from adapter.errors import AdapterError, InvalidRequest, ModelNotFound
from adapter.frontends.status import grpc_status

# what grpc leaves as it is in a status text (gRPC over HTTP/2, Percent-Encoded)
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
LIMIT = 7 * 2**10


def encoded_bytes(text: str) -> int:
    return len(quote(text, safe=PLAIN))


@given(st.text(), st.integers(0, 4000))
def test_text_fits_metadata_and_says_what_is_cut(text, times):
    whole = f"InvalidRequest: {text * times}".encode("utf-8", "backslashreplace").decode()
    _, said = grpc_status(InvalidRequest(text * times))
    assert encoded_bytes(said) <= LIMIT
    if encoded_bytes(whole) <= LIMIT:
        assert said == whole
    else:
        kept, _, mark = said.rpartition(" ... (")
        assert whole.startswith(kept)
        assert mark == f"{len(whole) - len(kept)} characters cut)"
        assert encoded_bytes(said) > LIMIT - 20


@pytest.mark.parametrize(
    "text",
    ["Request for unknown model: 'm' is not found", "Model m not found"],
)
def test_no_text_is_not_found_for_mesh(text):
    code, said = grpc_status(InvalidRequest(text))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said == f"InvalidRequest: {text}"
    assert grpc_status(ModelNotFound(text))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("kind", [ModelNotFound, errors.ArtifactNotFound])
def test_unknown_model_has_tritons_words_without_mesh(kind):
    error = kind("model 'm' is not loaded", model_id="m")
    ours = f"{kind.__name__}: model 'm' is not loaded"
    assert grpc_status(error)[1] == f"Request for unknown model: 'm' is not found; {ours}"
    assert grpc_status(error, is_of_mesh=True)[1] == ours


def test_an_error_nobody_foresaw_is_internal():
    class Odd(AdapterError):
        pass

    assert grpc_status(Odd("x")) == (grpc.StatusCode.INTERNAL, "InternalError: x")


def test_full_queue_sends_mesh_to_another_copy():
    """No Triton does not."""
    full = errors.Overloaded("a queue is full", delivered=False)
    gone = errors.BackendUnavailable("Triton is gone", delivered=False)
    assert grpc_status(full)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert grpc_status(gone)[0] is grpc.StatusCode.UNAVAILABLE
