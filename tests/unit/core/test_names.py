"""Names for Triton: one for each id, safe wherever Triton pastes it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core.model import (
    MAX_MODEL_ID_BYTES,
    ModelId,
    is_safe_name,
    parse_model_id,
    triton_name,
)
from adapter.errors import InvalidRequest

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
# short alphabets that make near collisions likely, beside everything else
IDS = st.one_of(
    st.text(min_size=1),
    st.text(alphabet="ta.uh_20-/ A", min_size=1, max_size=12),
    st.text(alphabet="ab_", min_size=195, max_size=205),
    st.text(alphabet="a/", min_size=60, max_size=80),
)


@pytest.mark.parametrize(
    ("given_id", "name"),
    [
        ("fraud-v2.tar.gz", "fraud-v2.tar.gz"),
        ("a_b", "a_b"),
        ("7", "7"),
        ("team/a b", "ta.u.team_2fa_20b"),
        ("_a", "ta.u._5fa"),
        (".hidden", "ta.u._2ehidden"),
        ("..", "ta.u._2e_2e"),
        ("a..b", "ta.u.a_2e_2eb"),
        ("a.b", "a.b"),
        ("-rf", "ta.u.-rf"),
        ("a\n", "ta.u.a_0a"),
        ("$(id)'", "ta.u._24_28id_29_27"),
        ("ü", "ta.u._c3_bc"),
        ("模型", "ta.u._e6_a8_a1_e5_9e_8b"),
        ("ta.", "ta.u.ta_2e"),
        ("ta.u.team_2fa_20b", "ta.u.ta_2eu_2eteam_5f2fa_5f20b"),
        ("ta.h." + "0" * 64, "ta.u.ta_2eh_2e" + "0" * 64),
        ("TA.u.x", "TA.u.x"),
        ("a" * 200, "a" * 200),
    ],
)
def test_only_what_is_unsafe_is_renamed(given_id, name):
    assert triton_name(ModelId(given_id)) == name
    assert is_safe_name(given_id) == (given_id == name)


@pytest.mark.parametrize("given_id", ["a" * 201, "a" * 300, "/" * 66, "ü" * 300, "x" * 1024])
def test_a_long_id_gets_a_hash(given_id):
    name = triton_name(ModelId(given_id))
    assert re.fullmatch(r"ta\.h\.[0-9a-f]{64}", name)


@given(IDS)
def test_a_name_is_one_short_safe_path_segment(text):
    name = triton_name(ModelId(text))
    assert SAFE.fullmatch(name)
    assert ".." not in name


@given(IDS, IDS)
def test_two_ids_never_share_a_name(first, second):
    same = triton_name(ModelId(first)) == triton_name(ModelId(second))
    assert same == (first == second)


@given(IDS)
def test_callers_id_may_resemble_our_names(text):
    name = triton_name(ModelId(text))
    again = triton_name(ModelId(name))
    if name.startswith("ta."):
        assert again != name


@pytest.mark.parametrize(
    "text", ["", "a\x00b", "\ud800", "a" * (MAX_MODEL_ID_BYTES + 1), "ü" * 513]
)
def test_id_that_is_no_name_is_refused(text):
    with pytest.raises(InvalidRequest, match="model_name"):
        parse_model_id(text)


@pytest.mark.parametrize("text", ["m", " ", "../..", "a\nb", "ü" * 512, "a" * MAX_MODEL_ID_BYTES])
def test_every_other_id_is_opaque(text):
    assert parse_model_id(text) == text
