"""Models that take memory, what their Triton takes in all, and whether all books say the same."""

from collections.abc import Collection
from pathlib import Path

from tests.asking import model_names, triton_index
from tests.processes import descendants, tritonserver
from tests.running import Client, RunningAdapter
from tests.trees import CONFIG, write_python_model

MIB = 2**20
GIB = 2**30

_PRESENT = {"READY", "LOADING", "UNLOADING"}


def write_eater(
    folder: Path, mebibytes: int, *, declares: str | None = None, **bodies: str
) -> Path:
    """A model that takes so much memory, for as long as it is loaded, and really has it.

    `declares` is what its config says that it takes. `bodies` as of write_python_model.
    """
    said = "" if declares is None else _parameter(declares)
    return write_python_model(
        folder,
        imports="import numpy\n" + bodies.pop("imports", ""),
        initialize=f"self.held = numpy.ones({mebibytes * MIB}, numpy.uint8)\n"
        + bodies.pop("initialize", ""),
        config=CONFIG + said,
        **bodies,
    )


def _parameter(declares: str) -> str:
    return f'parameters {{ key: "memory_bytes" value {{ string_value: "{declares}" }} }}\n'


def tree_bytes(adapter: RunningAdapter) -> int:
    """What the adapter's own Triton and all its processes take, shared pages once."""
    server = tritonserver(adapter)
    return sum(map(_share_bytes, [server, *descendants(server)]))


def _share_bytes(pid: int) -> int:
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))


def check_agreement(adapter: RunningAdapter, stuck: Collection[str] = ()) -> None:
    """At rest: the list, the ledger, Triton's index and the folders staged for it are of one mind.

    Triton has nothing but models of this adapter. `stuck` are those that it does not release.
    """
    state = adapter.state()
    names = {model["triton_name"] for model in state["models"]} | set(stuck)
    with adapter.client() as client:
        assert model_names(client) == sorted(model["model_id"] for model in state["models"])
    assert {name for name, seen in triton_index(adapter).items() if seen in _PRESENT} == names
    assert {path.name for path in adapter.repository.iterdir() if path.is_dir()} == names
    for device, book in state["memory"]["devices"].items():
        held = [model["bytes"].get(device, 0) for model in state["models"]]
        assert book["used_by_models_bytes"] == sum(held)
        # while a process of a stuck load lives, what it took stays reserved
        assert stuck or book["reserved_bytes"] == 0


def metric(adapter: RunningAdapter, line: str) -> float:
    """The value of the one line that begins so. There must be one: what is counted by a label has
    none before the first time (`counted`).
    """
    [value] = _values(adapter, line)
    return value


def counted(adapter: RunningAdapter, line: str) -> float:
    """The same; 0 while it has never been counted."""
    return sum(_values(adapter, line))


def _values(adapter: RunningAdapter, line: str) -> list[float]:
    with Client(adapter.admin) as admin:
        page = admin.get("/metrics").body.decode()
    return [float(row.split()[-1]) for row in page.splitlines() if row.startswith(line)]
