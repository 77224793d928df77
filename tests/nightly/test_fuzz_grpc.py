"""The tests of tests/frontends/grpc/test_proxy_fuzz.py, with other examples each time."""

from tests.frontends.grpc import test_proxy_fuzz as fuzz
from tests.nightly.again import play_until


def test_anything_sent_to_the_grpc_proxy(seconds, seed):
    tests = (
        fuzz.test_a_client_that_sends_anything,
        fuzz.test_a_triton_that_sends_anything,
        fuzz.test_a_message_in_pieces_is_judged_as_in_one,
        fuzz.test_a_block_read_by_its_fields_means_what_it_means_as_a_whole,
    )
    play_until(seconds, seed, tests)
