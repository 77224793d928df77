"""Which model of a package answers, what the others are to it, and what they are called."""

import ast
import itertools
import re
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapter.core.model import TritonName, is_safe_name, private_name, show_own_names
from adapter.errors import InvalidModel
from adapter.packages.members import Member, Plan, mentioned, names_in_paths, plan
from tests.cases import rows

NAMES = ["a", "b", "c", "d", "e", "f"]


def model(name, *mentions):
    return Member(name, is_ensemble=False, steps=(), mentions=frozenset(mentions))


def group(name, *steps):
    return Member(name, is_ensemble=True, steps=steps, mentions=frozenset())


def refusal(*members, hint=None):
    with pytest.raises(InvalidModel) as caught:
        plan(members, hint, "/models/m")
    assert str(caught.value).startswith("/models/m")
    return str(caught.value)


def test_the_ensemble_that_nothing_uses_is_the_entry():
    members = [model("pre"), group("inner", "pre"), group("top", "inner", "net"), model("net")]
    found = plan(members, None, "")
    assert found.entry == "top"
    assert set(found.steps) == {"pre", "inner", "net"}
    assert found.helpers == ()


def test_an_ensemble_goes_before_a_free_model():
    assert plan([model("a"), group("top", "z"), model("z")], None, "") == Plan(
        "top", ("z",), ("a",)
    )


def test_ensemble_that_code_calls_is_not_entry():
    members = [group("inner", "net"), model("net"), model("top", "inner")]
    assert plan(members, None, "") == Plan("top", (), ("net", "inner"))


@pytest.mark.parametrize(
    ("members", "candidates"),
    [
        ([model("a"), model("b")], "'a', 'b'"),
        ([group("x", "m"), group("y", "m"), model("m"), model("z")], "'x', 'y', 'z'"),
        ([model("a", "b"), model("b", "a"), model("c", "a", "c"), model("d")], "'c', 'd'"),
        ([model("b", "a"), model("a", "b")], "'a', 'b'"),
    ],
)
def test_possible_entries_are_named(members, candidates):
    text = refusal(*members)
    assert f"any of {candidates} may" in text
    assert text.startswith("/models/m: set the parameter adapter_entry in the config.pbtxt of the")
    assert '"entry" in the load request' in text


CALLER = Member("c", is_ensemble=False, steps=(), mentions=frozenset(), has_calls=True)
DECLARED = Member("d", is_ensemble=False, steps=(), mentions=frozenset(), is_entry=True)


def test_only_model_that_calls_others_is_the_entry():
    """Its code may make the names that it calls, so it seems to refer to nobody."""
    assert plan([model("a"), CALLER, model("b")], None, "") == Plan("c", (), ("a", "b"))


def test_declared_entry_goes_before_all_rules():
    members = [group("top", "d"), DECLARED, CALLER]
    assert plan(members, None, "").entry == "d"
    assert plan(members, "top", "").entry == "top"


def test_entry_is_refused_when_two_models_declare_it():
    other = Member("e", is_ensemble=False, steps=(), mentions=frozenset(), is_entry=True)
    assert "set the parameter adapter_entry in one config.pbtxt; 'd', 'e' have it" in refusal(
        DECLARED, other
    )


def test_hint_is_checked_for_single_model_too():
    assert "'b'" in refusal(model("a"), hint="b")


@pytest.mark.parametrize("steps", ["aa", "ab ba", "ab bc cb", "ab bc ca", "ab ac bd db cd"])
def test_circle_of_ensembles_is_named_in_its_direction(steps):
    names = sorted({*steps} - {" "})
    members = [group(name, *(b for a, b in steps.split() if a == name)) for name in names]
    circle = re.findall("'(.)'", refusal(*members, hint="a").partition("circle: ")[2])
    assert circle[0] == circle[-1]
    assert {a + b for a, b in itertools.pairwise(circle)} <= set(steps.split())


def test_circular_helpers_come_first_by_name():
    members = [model("top", "a"), model("a", "z"), model("z", "y"), model("y", "z"), model("x")]
    assert plan(members, "top", "").helpers == ("x", "y", "z", "a")


@st.composite
def packages(draw):
    """Steps lead to later names only, mentions anywhere."""
    found = []
    for number, name in enumerate(NAMES):
        later = NAMES[number + 1 :]
        steps = draw(st.lists(st.sampled_from(later), max_size=2)) if later else []
        mentions = frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=3)))
        found.append(Member(name, is_ensemble=bool(steps), steps=tuple(steps), mentions=mentions))
    return found


@given(packages(), st.permutations(NAMES))
def test_every_member_has_one_part_whatever_the_order(members, order):
    found = plan(members, "a", "")
    assert sorted([found.entry, *found.steps, *found.helpers]) == NAMES
    assert plan(sorted(members, key=lambda m: order.index(m.name)), "a", "") == found


def test_long_chains_do_not_recurse():
    count = 2 * sys.getrecursionlimit()
    chain = [group(f"m{number}", f"m{number + 1}") for number in range(count)]
    assert len(plan([*chain, model(f"m{count}")], None, "").steps) == count
    calls = [model(f"m{number:05}", f"m{number + 1:05}") for number in range(count)]
    assert plan(calls, None, "").helpers[0] == f"m{count - 1:05}"


ENTRY = TritonName("fraud")


@pytest.mark.parametrize(
    ("own", "shown"),
    [("pre", "pre"), ("a_b", "a_5fb"), ("ü/", "_c3_bc_2f"), ("a..b-C", "a_2e_2eb-C")],
)
def test_private_name_starts_with_what_stands_for_entry(own, shown):
    assert private_name(ENTRY, own) == f"ta.p.f02b95ed0b00ce45.{shown}"


@given(st.text(alphabet=st.characters(), max_size=300))
def test_private_name_is_short_safe_and_ours(own):
    name = private_name(ENTRY, own)
    assert re.fullmatch(r"ta\.p\.[0-9a-f]{16}\.[A-Za-z0-9_-]*", name)
    assert len(name) <= 200
    assert not is_safe_name(name)


OWN = st.one_of(
    st.text(alphabet=st.characters(), max_size=5),
    st.text(alphabet="_2f/", max_size=6),
    st.text(alphabet="ab", min_size=176, max_size=180),
)


@given(OWN, OWN)
@example("/", "_2f")
def test_two_models_of_package_never_share_name(first, second):
    assert (private_name(ENTRY, first) == private_name(ENTRY, second)) == (first == second)


@pytest.mark.parametrize("own", ["pre", "a_b-C", "ü/", "1_predict", "x y"])
def test_texts_have_the_own_name_of_a_part(own):
    private = private_name(ENTRY, own)
    text = "ensemble 'e' depends on '{0}' whose version 0 is not loaded; {0}_0_0, {0}_12_0: {0}."
    assert show_own_names(text.format(private)) == text.format(own)


def test_name_that_was_hashed_stays_in_texts():
    private = private_name(ENTRY, "x" * 300)
    assert show_own_names(f"'{private}'") == f"'{private}'"


LITERALS = [
    'call("net")',
    "call('net')",
    'call("""net""")',
    "call('''net''')",
    'call(r"net")',
    "x = {'net': 1}",
    "x = '#', 'net'",
    "x = '\\'', 'net'",
    'x = """a "quoted" word\n""", "net"',
    "x = '''it's''', 'net'",
]
NO_LITERALS = ["net = 1", "# 'net'", "x = 'network'", "x = 'a net'", "x = \"'net'\"", ""]
BROKEN = "print 'x'\n"  # of Python 2


@rows("source", LITERALS)
@rows("before", ["", BROKEN])
def test_a_string_literal_is_a_mention(before, source):
    assert mentioned(before + source + "\n", ["net", "other"]) == {"net"}


@rows("source", NO_LITERALS)
@rows("before", ["", BROKEN])
def test_partial_string_literal_is_no_mention(before, source):
    assert mentioned(before + source + "\n", ["net"]) == frozenset()


def test_an_unclosed_string_ends_with_its_line():
    assert mentioned("print 'x\ncall('net')", ["net"]) == {"net"}


@pytest.mark.slow
def test_slow_source_is_not_parsed():
    """Python's own parser takes seconds for it, in which no other thread runs."""
    source = "a;" * 120_000 + "'net'"
    began = time.thread_time()
    assert mentioned(source, ["net"]) == {"net"}
    searched = time.thread_time()
    ast.parse(source)
    parsed = time.thread_time()
    assert searched - began < (parsed - searched) / 3


@rows(
    "source",
    [
        "\0'net'",
        "\ud800 'net'",
        "(" * 500 + "'net'",
        "-" * 100_000 + " 'net'",
        "x" + ".y" * 100_000 + "; 'net'",
        "9" * 5000 + "; 'net'",
        "'\\d'; 'net'",
        "'net' '",
        "'net'; x = '''",
        "'net'; '\\",
    ],
)
def test_source_of_any_kind_is_searched_without_error(source):
    assert mentioned(source, ["net"]) == {"net"}


@given(st.text(alphabet="'\"\\#\n netx(f", max_size=60))
def test_no_source_is_an_error(source):
    assert mentioned("? " + source, ["net"]) <= {"net"}


@pytest.mark.timeout(20)
@rows("piece", ["\\'''\n", '"""\\', "'\\", "'\n", '"', "'''a", "#", "\\'''", "''' "])
def test_searching_takes_linear_time(piece):
    assert mentioned("? " + piece * 100_000, ["net"]) == frozenset()


@rows(
    ("source", "names"),
    [
        ("Path(parent / 'painter/1/factor.txt')", {"painter", "1"}),
        ('parent / "painter" / "1"', {"painter", "1"}),
        ("os.path.join(parent, 'painter', '1')", {"painter", "1"}),
        ("f'{parent}/painter/1'", {"painter"}),
        ("InferenceRequest(model_name='painter')", set()),
        ("call('painter', 'other')", set()),
    ],
)
def test_names_of_folders_are_found_in_paths(source, names):
    assert names_in_paths(source) & {"painter", "1", "other"} == names


def test_names_in_paths_take_linear_time():
    for piece in ("'", "/", "/ ", ", '", "join(", "'a" * 200):
        begun = time.perf_counter()
        names_in_paths("join(" + piece * (2**19 // len(piece)))
        assert time.perf_counter() - begun < 5
