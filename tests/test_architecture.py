"""The rules of the code that `make check` does not see."""

import ast
import gc
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from adapter.telemetry.log import EVENTS
from tests.nightly.__main__ import SHARES

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for path in (ROOT / "adapter").rglob("*.py")
    if "_proto" not in path.relative_to(ROOT).parts
)

_LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_LOGGERS = {"log", "_log", "logging.getLogger(__name__)"}
_EVENT = re.compile(r"[a-z]+\.[a-z]+(_[a-z]+)*")
# what the events of control/operations.py are named after
_OPERATIONS = {"load", "unload"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


Sources = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    """All nodes of each module, itself first. Nobody looks for garbage among them."""
    gc.disable()
    found = {
        path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=name(path))))
        for path in SOURCES
    }
    gc.freeze()
    gc.enable()
    yield found
    found.clear()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, nodes: list[ast.AST], modules: set[str]) -> set[str]:
    """Which of these, also where it is for types alone."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & modules or {node.module or ""}
    return (found & modules) - {module_of(path)}


def test_no_two_modules_import_each_other(sources: Sources):
    modules = {module_of(path) for path in SOURCES}
    graph = {module_of(path): imported(path, nodes, modules) for path, nodes in sources.items()}
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()  # CycleError names those that do


def test_nobody_uses_the_threads_that_all_share(sources: Sources):
    """adapter/runtime/threads.py has some for each kind of work."""
    shared = {
        f"{name(path)}:{node.lineno}"
        for path, nodes in sources.items()
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in {"to_thread", "run_in_executor"}
    }
    assert shared == set()


def test_only_inspect_parses_python_code(sources: Sources):
    """CPython's parser is not safe in threads: one that is interrupted by another raises
    SystemError (AST constructor recursion depth mismatch; seen on 3.11.7). `inspect` is a process
    of its own, whose other threads wait meanwhile.
    """
    users = {
        name(path)
        for path, nodes in sources.items()
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "ast" in {getattr(node, "module", None), *(alias.name for alias in node.names)}
    }
    assert users == {"adapter/cli/inspect.py"}


def protocols(nodes: list[ast.AST]) -> list[ast.ClassDef]:
    return [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    ]


def waits(path: Path, nodes: list[ast.AST]) -> list[int]:
    """The lines that wait, but for the shapes of what others do asynchronously."""
    shapes = {node for shape in protocols(nodes) for node in ast.walk(shape)}
    assert path.name == "calls.py" or not shapes
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        and node not in shapes
    ]


def test_the_core_decides_and_never_waits(sources: Sources):
    core = [path for path in SOURCES if path.is_relative_to(ROOT / "adapter" / "core")]
    assert core
    assert {name(path): found for path in core if (found := waits(path, sources[path]))} == {}


def logged(nodes: list[ast.AST]) -> set[str]:
    """Return the events of all log calls; where one is in a variable, all that the module names."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=logger, attr=level), args=arguments):
                if level not in _LEVELS or ast.unparse(logger) not in _LOGGERS:
                    continue
                message = arguments[level == "log"]
                if isinstance(message, ast.Name):
                    found |= constants(nodes)
                else:
                    text = ast.unparse(message).removeprefix("f").strip("'")
                    found |= {text.replace("{operation}", each) for each in _OPERATIONS}
    return found


def constants(nodes: list[ast.AST]) -> set[str]:
    """Return the strings of a module that look like events."""
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _EVENT.fullmatch(node.value)
    }


@pytest.fixture(scope="module")
def logged_events(sources: Sources) -> dict[str, str]:
    return {event: name(path) for path, nodes in sources.items() for event in logged(nodes)}


def test_every_event_that_is_logged_is_described(logged_events: dict[str, str]):
    assert {event: path for event, path in logged_events.items() if event not in EVENTS} == {}


def test_every_event_that_is_described_is_logged(logged_events: dict[str, str]):
    assert set(EVENTS) - set(logged_events) == set()


def test_event_is_a_noun_and_a_participle():
    assert [event for event in EVENTS if not _EVENT.fullmatch(event)] == []


def test_nightly_mistakes_fit_the_code():
    """test_mutants.py and test_simulation.py make them; a change of a line changes them too."""
    mutants = []
    for file in ("mutants.toml", "simulated_mutants.toml"):
        text = (ROOT / "tests" / "nightly" / file).read_text(encoding="utf-8")
        mutants += tomllib.loads(text)["mutant"]
    odd = [m["name"] for m in mutants if (ROOT / m["file"]).read_text().count(m["was"]) != 1]
    assert odd == []
    assert [t for m in mutants for t in m.get("tests", ()) if not (ROOT / t).exists()] == []


def test_each_nightly_test_is_in_a_part():
    ran = [ROOT / place for place, _ in SHARES.values()]
    files = ROOT.glob("tests/**/test_*.py")
    nightly = [
        file
        for file in files
        if file.parent.name == "nightly" or re.search(r"pytest\.mark\.nightly\b", file.read_text())
    ]
    lost = [file for file in nightly if not any(file.is_relative_to(place) for place in ran)]
    assert lost == []
    assert [place for place in ran if not place.exists()] == []
