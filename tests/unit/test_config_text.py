"""Removing `name` from config.pbtxt: the examples people write, and generated configs."""

import re

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.packages.config_text import without_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('name: "x"\nbackend: "b"\n', ' \nbackend: "b"\n', id="a line of its own"),
        pytest.param('name:"x"backend:"b"', 'backend:"b"', id="no blanks"),
        pytest.param("name : 'x' max_batch_size: 8", "   max_batch_size: 8", id="single quotes"),
        pytest.param('name: "x"; backend: "b"', '  backend: "b"', id="semicolon"),
        pytest.param('a: 1, name: "x", b: 2', "a: 1,   b: 2", id="comma, in mid-line"),
        pytest.param('name: "x";;', " ;", id="only one separator"),
        pytest.param('name: "a" "b"\n\'c\' b: 1', "  \n b: 1", id="joined strings"),
        pytest.param(r'name: "a\"} name: \\" b: 1', "  b: 1", id="escapes"),
        pytest.param('name: "x" # { "\nb: 1', '  # { "\nb: 1', id="braces in comments"),
        pytest.param('name # {\n: # "\n"x" # }\n; b: 1', ' # {\n # "\n # }\n b: 1', id="inside"),
        pytest.param('name: "x"\r\nb: 1\r\n', " \r\nb: 1\r\n", id="CRLF"),
        pytest.param('\ufeffname: "x"\nb: 1', " \nb: 1", id="byte order mark"),
        pytest.param("\ufeffb: 1", "b: 1", id="byte order mark, no name"),
        pytest.param('name: "x" b: 1 name: "y"', "  b: 1  ", id="twice"),
        pytest.param('name: "x"', " ", id="nothing else"),
    ],
)
def test_the_name_goes_and_every_other_byte_stays(text, expected):
    assert without_name(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "x" }',
        'input [ { name: "x" }, { name: "y" } ]',
        'input < name: "x" >',
        'parameters { key: "name" value { string_value: "name: \\"x\\"" } }',
        'model_name: "x" namespace: "y" name_2: "z" Name: "w"',
        '# name: "x"\nb: 1',
        "backend: 'name: \"x\"'",
        "platform: name\nb: 1",
        'name { name: "x" }',
        "name: 3",
        'name, "x"',
        "name:",
        "name",
        "",
    ],
)
def test_what_only_looks_like_the_name_stays(text):
    assert without_name(text) == text


@pytest.mark.parametrize(
    "text",
    [
        'name: "x" input {',
        'name: "x" }',
        'name: "x" input { >',
        'name: "x" input [ { ] }',
        'name: "x',
        "name: 'x\n'",
        '\ufeffname: "x" }',
    ],
)
def test_an_unbalanced_text_is_left_to_the_parser(text):
    assert without_name(text) == text


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_GAPS = st.lists(
    st.sampled_from([" ", "\t", "\n", "\r\n", '# } name: "x\n', "# it's {\r\n", "#\n"]), max_size=3
).map("".join)
# one token of printed text format: a gap may go between any two
_PRINTED = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|[\w.+-]+|[^\s\w])""")


@st.composite
def _configs(draw):
    config = ModelConfig(
        name=draw(_TEXTS),
        backend=draw(_TEXTS),
        max_batch_size=draw(st.integers(0, 64)),
        metric_tags=draw(st.dictionaries(_TEXTS, _TEXTS, max_size=2)),
    )
    for name in draw(st.lists(_TEXTS, max_size=3)):
        config.input.add(name=name, dims=[-1, 3], data_type="TYPE_FP32")
        config.instance_group.add(name=name, count=2)
        config.ensemble_scheduling.step.add(model_name=name).input_map["name"] = name
        config.parameters[name].string_value = name
    return config


@st.composite
def _layouts(draw):
    """A config, and a text of it in one of the ways that people and tools lay it out."""
    config = draw(_configs())
    printed = text_format.MessageToString(
        config,
        as_one_line=draw(st.booleans()),
        as_utf8=draw(st.booleans()),
        pointy_brackets=draw(st.booleans()),
        use_short_repeated_primitives=draw(st.booleans()),
    )
    text = "".join(f" {token}{draw(_GAPS)}" for token in _PRINTED.findall(printed))
    return config, text


@given(_layouts())
def test_the_rest_means_the_same(layout):
    config, text = layout
    before = text_format.Parse(text, ModelConfig())
    assert before == config
    config.ClearField("name")
    assert text_format.Parse(without_name(text), ModelConfig()) == config


_PIECES = ['names: "name"', "Name :", "'name'", '"', "{", "}", ";", "\\", '# name: "x"\n']


@given(st.lists(st.sampled_from(_PIECES)).map("".join))
def test_any_text_in_which_no_field_is_called_name_stays(text):
    assert without_name(text) == text
