"""The edits to config.pbtxt: the examples people write, and generated configs."""

import re

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from adapter.packages.config_text import (
    fields_of,
    rename_steps,
    tokens_of,
    with_gpu,
    with_parameters,
    with_tensors,
    without_cache,
    without_name,
)
from tests.cases import rows


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


@rows(
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


STEPS = {"a": "A", "it's": "\\", "é": "ü", '"': 'x"\n\x01'}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param('step { model_name: "a" }', 'step { model_name: "A" }', id="braces"),
        pytest.param("step < model_name:'a' >", 'step < model_name:"A" >', id="angles, quotes"),
        pytest.param(
            "step [ {model_name: 'a'}, <model_name: 'a'> ]",
            'step [ {model_name: "A"}, <model_name: "A"> ]',
            id="list",
        ),
        pytest.param(
            'step: { model_name: "a" } step: { model_name: "a" }',
            'step: { model_name: "A" } step: { model_name: "A" }',
            id="repeated, with a colon",
        ),
        pytest.param(
            "step [{ model_version: -1, model_name # {\n: # 'a'\n'a'; }]",
            "step [{ model_version: -1, model_name # {\n: # 'a'\n\"A\"; }]",
            id="comments",
        ),
        pytest.param(
            """step { model_name: "i" 't' # }\n "\\'s" }""",
            """step { model_name: "\\\\"  # }\n  }""",
            id="adjacent strings",
        ),
        pytest.param(r'step { model_name: "\141" }', 'step { model_name: "A" }', id="octal"),
        pytest.param(r'step { model_name: "\x61" }', 'step { model_name: "A" }', id="hex"),
        pytest.param(r'step { model_name: "\u0061" }', 'step { model_name: "A" }', id="unicode"),
        pytest.param(r'step { model_name: "\U00000061" }', 'step { model_name: "A" }', id="long"),
        pytest.param(
            r"""step { model_name: "\303" '\251' }""", 'step { model_name: "ü"  }', id="split char"
        ),
        pytest.param(
            r'step { model_name: "\"" }', r'step { model_name: "x\"\012\001" }', id="quoting"
        ),
    ],
)
@pytest.mark.parametrize(
    "frame",
    [
        'name: "a" # model_name: "a"\nensemble_scheduling {%s}\nbackend: "a"',
        "ensemble_scheduling:<%s>",
        'input [{name:"a"}]ensemble_scheduling{future{model_name:"a"},%s}',
    ],
)
def test_only_step_names_change(frame, step, expected):
    assert rename_steps(frame % step, STEPS) == frame % expected


@rows(
    "text",
    [
        'model_name: "a"',
        'step { model_name: "a" }',
        'ensemble_scheduling { model_name: "a" }',
        'future { ensemble_scheduling { step { model_name: "a" } } }',
        'ensemble_scheduling { step { future { model_name: "a" } } }',
        'ensemble_scheduling { future { step { model_name: "a" } } }',
        'ensemble_scheduling { step { input_map { key: "model_name" value: "a" } } }',
        "ensemble_scheduling { step { input_map { key: 'model_name: \"a\"' value: 'a' } } }",
        'ensemble_scheduling { # step { model_name: "a" }\n }',
        'ensemble_scheduling { step { model_namespace: "a" } }',
        'ensemble_scheduling { } step { model_name: "a" }',
        'ensemble_scheduling { step { model_name: "b" } }',
        "ensemble_scheduling { step { model_name: 'A' 'a' } }",
        "ensemble_scheduling { step { model_name: a } }",
        'ensemble_scheduling { step { model_name: "a" }',
        'ensemble_scheduling { step { model_name: "a" } } "',
        r'ensemble_scheduling { step { model_name: "\Uffffffff \ud800 \377" } }',
    ],
)
def test_what_is_no_step_of_known_model_stays(text):
    assert rename_steps(text, {"a": "A"}) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ('backend: "b"\n', 'backend: "b"\n'),
        ('backend: "b" # the last line', 'backend: "b" # the last line\n'),
        ('backend: "b"\r\n', 'backend: "b"\r\n'),
    ],
)
def test_parameters_are_lines_of_their_own_at_end(text, expected):
    line = 'parameters { key: "k" value { string_value: "a\\"\\\\\\012é" } }\n'
    assert with_parameters(text, {"k": 'a"\\\né'}) == expected + line
    assert with_parameters(text, {}) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("input{}backend:'b'", "input [I]backend:'b'", id="in place"),
        pytest.param("a: 1,input: [{}, <>],b: 2", "a: 1,input [I]b: 2", id="separators"),
        pytest.param("input {} b: 1 input {} # c", "input [I] b: 1  # c", id="all of them"),
        pytest.param("input [ # {\n ]; # c\nb: 1", "input [I] # c\nb: 1", id="comments"),
        pytest.param("b { input {} }", "b { input {} }\ninput [I]\n", id="none at the top"),
        pytest.param("# input {}", "# input {}\ninput [I]\n", id="none but in a comment"),
        pytest.param("inputs {}\n", "inputs {}\ninput [I]\n", id="none of this name"),
        pytest.param("", "input [I]\n", id="nothing"),
        pytest.param("input {", "input {", id="unbalanced"),
        pytest.param("output {}", "output {}\ninput [I]\n", id="the other"),
    ],
)
def test_tensors_take_place_of_those_of_text(text, expected):
    assert with_tensors(text, "[I]", None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a: 1", "a: 1\ninstance_group { kind: KIND_GPU gpus: 3 }\n", id="none"),
        pytest.param(
            "instance_group: []",
            "instance_group: []\ninstance_group { kind: KIND_GPU gpus: 3 }\n",
            id="an empty list",
        ),
        pytest.param(
            "instance_group { count: 2 }", "instance_group { gpus: 3  count: 2 }", id="one message"
        ),
        pytest.param(
            "instance_group: <kind: KIND_GPU>",
            "instance_group: < gpus: 3 kind: KIND_GPU>",
            id="angle brackets",
        ),
        pytest.param(
            "instance_group [ # {\n { kind: KIND_CPU }, { name: '}' }, {} ] b: 1",
            "instance_group [ # {\n { kind: KIND_CPU }, { gpus: 3  name: '}' }, { gpus: 3 } ] b: 1",
            id="a list, of which one is for CPUs",
        ),
        pytest.param(
            "instance_group {} instance_group { kind: 2 }",
            "instance_group { gpus: 3 } instance_group { kind: 2 }",
            id="twice",
        ),
        pytest.param(
            "instance_group { rate_limiter { resources [ { name: 'R' count: 1 } ] } }",
            "instance_group { gpus: 3  rate_limiter { resources [ { name: 'R' count: 1 } ] } }",
            id="messages within",
        ),
        pytest.param("ensemble_scheduling { }", "ensemble_scheduling { }", id="an ensemble"),
        pytest.param("instance_group {", "instance_group {", id="unbalanced"),
        pytest.param(
            "b { instance_group { } }",
            "b { instance_group { } }\ninstance_group { kind: KIND_GPU gpus: 3 }\n",
            id="a field of that name within another",
        ),
    ],
)
def test_each_group_on_gpus_names_the_gpu(text, expected):
    assert with_gpu(text, 3) == expected


@rows(
    ("text", "expected"),
    [
        ("response_cache { enable: true }", "response_cache { enable: false }"),
        ("response_cache:<enable:1>b: 1", "response_cache:<enable:false>b: 1"),
        ("response_cache { # on\n enable : True; }", "response_cache { # on\n enable : false; }"),
        ("response_cache {}", "response_cache {}"),
        ("optimization { enable: true }", "optimization { enable: true }"),
        ("response_cache { enable: true", "response_cache { enable: true"),
    ],
)
def test_response_cache_is_turned_off_alone(text, expected):
    assert without_cache(text) == expected


def test_inputs_and_outputs_are_each_replaced():
    assert with_tensors("output {} input {}", "[I]", "[O]") == "output [O] input [I]"
    assert with_tensors("output {} input {}", None, "[]") == "output [] input {}"
    assert with_tensors("output {} input {}", None, "") == "output {} input {}"
    assert with_tensors("a: 1", "[I]", "[O]") == "a: 1\ninput [I]\noutput [O]\n"


def test_fields_are_listed_with_their_parents():
    text = 'a: b c [ { d: "e: 1" }, < f { g: [1, h] } > ] # i: 1\nj: -inf'
    tokens = tokens_of(text)
    fields = fields_of(tokens)
    paths = [(field.name, field.parent and field.parent.name) for field in fields]
    expected = [("a", None), ("c", None), ("d", "c"), ("f", "c"), ("g", "f"), ("j", None)]
    assert paths == expected
    assert [tokens[field.position][0] for field in fields] == [name for name, _ in expected]
    assert fields_of(tokens_of("a: { b: 1")) == []


@pytest.mark.slow
def test_nesting_costs_linear_time_and_no_stack():
    depth = 25_000
    text = "a{" * depth + "}" * depth
    assert len(fields_of(tokens_of(text))) == depth
    assert rename_steps(text, {"a": "b"}) == text


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_GAPS = st.lists(
    st.sampled_from([" ", "\t", "\n", "\r\n", '# } name: "x\n', "# it's {\r\n", "#\n"]), max_size=3
).map("".join)
# one token of printed text format: a gap may go between any two
_WORD_CHARACTER = re.compile(r"[\w.+-]")
_PRINTED = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|[\w.+-]+|[^\s\w])""")


@st.composite
def _configs(draw):
    config = ModelConfig(
        name=draw(_TEXTS),
        backend=draw(_TEXTS),
        max_batch_size=draw(st.integers(0, 64)),
        metric_tags=draw(st.dictionaries(_TEXTS, _TEXTS, max_size=2)),
    )
    is_ensemble = draw(st.booleans())
    for name in draw(st.lists(_TEXTS, max_size=3)):
        config.input.add(name=name, dims=[-1, 3], data_type="TYPE_FP32")
        kind = draw(st.sampled_from(["KIND_AUTO", "KIND_GPU", "KIND_CPU"]))
        config.instance_group.add(name=name, count=2, kind=kind)
        if is_ensemble:
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
    text = ""
    for token in _PRINTED.findall(printed):
        gap = draw(_GAPS)
        # two words need a blank between them, all else may be written without one
        if not gap and _WORD_CHARACTER.match(token) and _WORD_CHARACTER.match(text[-1:]):
            gap = " "
        text += gap + token
    return config, text


@given(_layouts())
@pytest.mark.slow
def test_the_rest_means_the_same(layout):
    config, text = layout
    before = text_format.Parse(text, ModelConfig())
    assert before == config
    config.ClearField("name")
    assert text_format.Parse(without_name(text), ModelConfig()) == config


_PIECES = ['names: "name"', "Name :", "'name'", '"', "{", "}", ";", "\\", '# name: "x"\n']


def _parsed(text):
    return text_format.Parse(text, ModelConfig())


@given(_layouts(), st.dictionaries(_TEXTS, _TEXTS, max_size=3), st.data())
@pytest.mark.slow
def test_renamed_config_differs_in_names_only(layout, names, data):
    config, text = layout
    steps = config.ensemble_scheduling.step
    for step in steps:
        if data.draw(st.booleans()):
            names[step.model_name] = data.draw(_TEXTS)
    names.pop("", None)  # an empty name is not written at all
    renamed = _parsed(rename_steps(text, names))
    for step in steps:
        step.model_name = names.get(step.model_name, step.model_name)
    assert renamed == config


@given(_layouts())
@pytest.mark.slow
def test_gpu_is_added_to_each_group_alone(layout):
    config, text = layout
    edited = _parsed(with_gpu(text, 1))
    if not config.HasField("ensemble_scheduling"):
        if not config.instance_group:
            config.instance_group.add(kind="KIND_GPU")
        for group in config.instance_group:
            if group.kind != ModelInstanceGroup.KIND_CPU:
                group.gpus.append(1)
    assert edited == config


_UNKNOWN = st.sampled_from(
    [
        'tomorrow: "model_name: \\"a\\"" ',
        "tomorrow { input { name: 'n' } step < model_name: \"a\" > } # tomorrow\n",
        "tomorrow: [ { output [] }, < 3: 0x1F > ]; ",
        "tomorrow: [ -1, +2, 3.5e-7f, inf ], ",
    ]
)


@given(st.lists(_layouts().map(lambda layout: layout[1]) | _UNKNOWN, max_size=4))
@pytest.mark.slow
def test_fields_of_newer_schemas_stay_byte_for_byte(parts):
    text = "".join(parts)
    unknown = [part.strip() for part in parts if "tomorrow" in part]
    edited = with_tensors(without_name(text), "[]", "[]")
    edited = with_parameters(rename_steps(edited, {"a": "b"}), {"k": "v"})
    for part in unknown:
        assert edited.count(part) == text.count(part)


@given(st.text("ab:{}<>[]\"\\'#\n ,", max_size=40))
def test_no_text_is_too_odd(text):
    for edited in (rename_steps(text, {"a": "b"}), with_tensors(text, None, None)):
        assert edited == text
