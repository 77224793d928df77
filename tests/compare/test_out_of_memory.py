"""507 makes the platform evict good models, so it must be true.

The built-in endpoint looks for the letters OOM, among others, anywhere in a failure.
"""

import pytest

from tests.compare.servers import Endpoint, on_both
from tests.trees import infer_body

pytestmark = [pytest.mark.triton, pytest.mark.builtin, pytest.mark.nightly]

NAMES_ONLY = "OOM in a name is out of memory"
MISSED = "does not know these words"

ERRORS = {
    "std::bad_alloc": "raise RuntimeError('std::bad_alloc')",
    "Cannot allocate memory": "import errno, os; raise OSError(errno.ENOMEM, os.strerror(12))",
}
real_errors = pytest.mark.parametrize("raising", ERRORS.values(), ids=ERRORS)


@on_both(NAMES_ONLY)
def test_a_missing_file_of_that_name_is_no_memory_fault(endpoint: Endpoint) -> None:
    reply = endpoint.load("x", endpoint.model(initialize="open('BLOOM-560m/weights.bin')"))

    assert reply.status == 400
    assert b"BLOOM" in reply.body


@on_both(NAMES_ONLY)
def test_an_error_of_the_model_that_quotes_such_a_word_is_no_memory_fault(
    endpoint: Endpoint,
) -> None:
    endpoint.put("x", endpoint.model(answer="raise ValueError(\"no label 'ZOOM' in the list\")"))

    reply = endpoint.invoke("x")

    assert reply.status in {400, 500}
    assert b"ZOOM" in reply.body


@on_both(NAMES_ONLY)
def test_a_tensor_of_that_name_is_no_memory_fault(endpoint: Endpoint) -> None:
    endpoint.put("x", endpoint.model())
    body = infer_body(1.0)
    body["inputs"][0]["name"] = "ROOM"

    reply = endpoint.invoke("x", body)

    assert reply.status == 400
    assert b"ROOM" in reply.body


@on_both("the model of that name cannot be told from a memory fault")
def test_a_model_of_that_name_is_no_memory_fault(endpoint: Endpoint) -> None:
    reply = endpoint.load("OOM", endpoint.model(initialize="raise ValueError('no weights')"))

    assert reply.status == 400


@on_both(MISSED)
@real_errors
def test_a_load_that_ran_out_of_memory_says_so(endpoint: Endpoint, raising: str) -> None:
    assert endpoint.load("x", endpoint.model(initialize=raising)).status == 507


@on_both(MISSED)
@real_errors
def test_an_invocation_that_ran_out_of_memory_says_so(endpoint: Endpoint, raising: str) -> None:
    endpoint.put("x", endpoint.model(answer=raising))

    assert endpoint.invoke("x").status == 507
