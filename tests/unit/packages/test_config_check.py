"""What is wrong with a config.pbtxt, and what is only odd."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.errors import InvalidModel
from adapter.packages.config import MAX_CONFIG_BYTES, parse, read_config
from tests.cases import rows

PATH = Path("m/config.pbtxt")


def refusal(text):
    with pytest.raises(InvalidModel) as caught:
        parse(text, PATH)
    return str(caught.value)


def written(folder, raw):
    path = folder / "config.pbtxt"
    path.write_bytes(raw)
    return path


# --- reading


@pytest.mark.parametrize(
    "raw", [b"backend: 'b'\r\n", b"\xef\xbb\xbfb", "# \u00e9".encode(), b"#" * MAX_CONFIG_BYTES]
)
def test_a_config_is_read_as_it_is(raw, tmp_path):
    assert read_config(written(tmp_path, raw)).encode() == raw


# --- parsing


def test_config_is_parsed_whatever_mark_it_begins_with():
    checked = parse("\ufeffbackend: 'b'\nmax_batch_size: 8", PATH)
    assert checked.config == ModelConfig(backend="b", max_batch_size=8)
    assert checked.warnings == ()


@rows(
    ("text", "dims"),
    [
        ("dims: [ - 1 ]", [-1]),
        ("dims: [ 3, -\n1, - # any\n2 ]", [3, -1, -2]),
        ("dims: - 1 dims: -1", [-1, -1]),
    ],
)
def test_blank_is_allowed_behind_a_minus(text, dims):
    """Triton's parser allows it; Python's does not."""
    assert list(parse(f"input {{ {text} }}", PATH).config.input[0].dims) == dims


@rows(
    ("text", "reason"),
    [
        ("\nbackend: 3", ":2:10: Expected string but found: '3'"),
        ("max_batch_size: 'many'", ":1:17: Couldn't parse integer: 'many'"),
        ("input { dims: [ 1.5 ] }", ":1:17: Couldn't parse integer: 1.5"),
        ("input { dims: [ - ] }", ":1:17: Couldn't parse integer: -"),
        ("input { dims: [ 1 - 1 ] }", ":1:21: Expected"),
        ("input { data_type: TYPE_FP99 }", ':1:20: Enum type "inference.DataType" has no value'),
        ("backend { }", ':1:9: Expected ":".'),
        (
            "outputs [ { name: 'a' } ]",
            (":1:9: field 'outputs' is not known to this version's schema; did you mean output?"),
        ),
        (
            "input [ { dim [ 1 ] } ]",
            (":1:15: field 'dim' is not known to this version's schema; did you mean dims?"),
        ),
        ("input {\n", ':1:7: Expected "}".'),
        ("backend: 'b' }", ":1:14: Expected identifier or number, got }."),
        ('backend: "it\': s" }', ":1:19: Expected identifier or number, got }."),
        ("backend: 'b' backend: 'c'", ':1:23: Message type "inference.ModelConfig" should not'),
        ("backend: 'b", ':1:10: String missing ending quote: "\'"'),
        ("tomorrow: }", ": Invalid field value: }"),
        ("\ufeff?", ":1:1: Expected identifier or number, got ?."),
        ("#\n backend: 'b'\u00a0", ":2:14: character U+00A0 outside strings and comments"),
        ("\x1cbackend: 'b'", ":1:1: character U+001C outside strings and comments"),
        ("\u00e9: 1", ":1:1: character U+00E9 outside strings and comments"),
    ],
)
def test_invalid_config_is_refused_with_its_place(text, reason):
    assert refusal(text).startswith(f"m/config.pbtxt{reason}")


@pytest.mark.parametrize(
    "text",
    [
        f"backend: 3 # {'x' * 5000}",
        f"{'x' * 5000} ?",
        f"input {{ {'x: 1 ' * 5000}",
    ],
)
def test_a_reason_is_short_however_long_the_line(text):
    assert len(refusal(text)) < 400


# --- what a newer schema may know


@rows(
    ("text", "places"),
    [
        ("backend: 'b'", []),
        ("tomorrow: 1", [(1, "tomorrow")]),
        ("#\n\nbackend: 'b' tomorrow { x: 1 }", [(3, "tomorrow")]),
        ("\ufeff\r\ntomorrow: [ { x: 1 } ]; now <>", [(2, "tomorrow"), (2, "now")]),
        ("optimization {\n  tomorrow: x }", [(2, "tomorrow")]),
        ("input [ { name: 'a'\n}, {\n tomorrow: '' 'b: 1' }]", [(3, "tomorrow")]),
        ("parameters { key: 'k' value { string_value: 'v'\nfuture: 1 } }", [(2, "future")]),
        ("Input { name: 'a' }", [(1, "Input")]),
        ("input {\nmax_batch_size: 1 }", [(2, "max_batch_size")]),
        ("input { name: '\u00a0\u00e9' # \u00a0\u00e9\n\f\v} ", []),
        ("input { name: 'tomorrow: 1' # tomorrow: 1\n}", []),
        ("tomorrow: 1\ntomorrow: 1", [(1, "tomorrow"), (2, "tomorrow")]),
        ("tomorrow { a: b [c.d]: 1 [e.f.g/h.i] { i: 1 } }", [(1, "tomorrow")]),
    ],
)
def test_unknown_field_is_a_warning_with_line(text, places):
    found = [warning.partition("; did you mean")[0] for warning in parse(text, PATH).warnings]
    assert found == [
        f"m/config.pbtxt:{line}: field '{name}' is not known to this version's schema"
        for line, name in places
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("max_batchsize: 3", "; did you mean max_batch_size?"),
        ("Input { name: 'a' }", "; did you mean input?"),
        ("dynamic_batching { max_queue_delay: 3 }", "; did you mean max_queue_delay_microseconds?"),
        ("instance_group { gpu: 3 }", "; did you mean gpus?"),
        ("tomorrow: 1", ""),
        (f"{'max_batchsize' * 1000}: 1", ""),
    ],
)
def test_misspelt_field_gets_a_suggestion(text, meant):
    [warning] = parse(text, PATH).warnings
    assert warning.endswith(f"is not known to this version's schema{meant}")


def test_warnings_are_few_and_short():
    *first, last = parse(f"{'x' * 5000}: 1 " * 25, PATH).warnings
    assert len(first) == 10
    assert all(len(warning) < 400 for warning in first)
    assert last == "m/config.pbtxt: 15 more fields are not known to this version's schema"


_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(_NAMES, st.dictionaries(_NAMES, _NAMES, max_size=3), st.booleans(), st.booleans())
def test_no_field_of_a_printed_config_is_unknown(name, parameters, one_line, angles):
    config = ModelConfig(name=name, max_batch_size=4)
    config.input.add(name=name, dims=[-1, 2], reshape={"shape": [2]})
    config.ensemble_scheduling.step.add(model_name=name).input_map[name] = name
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    text = text_format.MessageToString(config, as_one_line=one_line, pointy_brackets=angles)
    checked = parse(text, PATH)
    assert checked.config == config
    assert checked.warnings == ()


def test_protobufs_parser_sees_no_long_line():
    """It quotes the line at each guess at the type of an unknown field: a square of time."""
    with pytest.raises(InvalidModel) as caught:
        parse("x: 1 " * 5000 + "backend: 3", PATH)
    assert str(caught.value).startswith("m/config.pbtxt:1:25010: ")
    assert len(str(caught.value.__cause__)) < 100


_FIELDS = ["a: .5", "a <> ", "b: [c, -1];", "input { dims: -1 } ", "output [{ name: 'b' 'c' }],"]


@given(st.lists(st.sampled_from([*_FIELDS, *"{}[]:'1#\n "]), max_size=4).map("".join))
def test_what_is_accepted_is_for_protobuf_to_say(text):
    try:
        expected = text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except text_format.ParseError:
        assert refusal(text).startswith("m/config.pbtxt:")
    else:
        assert parse(text, PATH).config == expected
