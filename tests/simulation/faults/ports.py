"""Plants faults at the ports, and in the settings that control is built with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adapter.errors import AdapterError
from tests.simulation.control import Machine
from tests.simulation.faults.fault import Changed, Fault


def _change_port(port: str, change: Callable[[Any], Any]) -> Callable[[Machine], Machine]:
    """Return what changes this port of a machine, if the machine has the port."""

    def changed(machine: Machine) -> Machine:
        target = getattr(machine, port)
        return machine if target is None else replace(machine, **{port: change(target)})

    return changed


def _returns(*, value: object) -> Callable[..., Any]:
    async def call(*_: object, **__: object) -> object:
        return value

    return call


def _is_part(name: str) -> bool:
    """Return whether the name in Triton is that of a helper or a step of a package."""
    return "." in name


def _skip_parts(verb: str) -> Callable[[Any], Any]:
    def change(triton: Any) -> Changed:
        async def call(name: str, model_id: str) -> None:
            if not _is_part(name):
                await getattr(triton, verb)(name, model_id)

        return Changed(triton, **{verb: call})

    return change


def _wait_for_entries_alone(triton: Any) -> Changed:
    async def wait_gone(names: Any, seconds: float) -> set[str]:
        return await triton.wait_gone([n for n in names if not _is_part(n)], seconds)

    return Changed(triton, wait_gone=wait_gone)


def _remember_loads(triton: Any) -> Changed:
    """Report each model as ready from its load to its unload."""
    loaded: set[str] = set()

    async def load(name: str, model_id: str) -> None:
        await triton.load(name, model_id)
        loaded.add(name)

    async def unload(name: str, model_id: str) -> None:
        loaded.discard(name)
        await triton.unload(name, model_id)

    async def ready() -> set[str]:
        return await triton.ready() | loaded

    return Changed(triton, load=load, unload=unload, ready=ready)


def _unload_good_loads_alone(triton: Any) -> Changed:
    failed: set[str] = set()

    async def load(name: str, model_id: str) -> None:
        failed.add(name)
        await triton.load(name, model_id)
        failed.discard(name)

    async def unload(name: str, model_id: str) -> None:
        if name not in failed:
            await triton.unload(name, model_id)

    return Changed(triton, load=load, unload=unload)


def _place_on_first(disk: Any) -> Changed:
    async def place(name: str, model_id: str, package: Any, gpu: int | None = None) -> Any:
        return await disk.place(name, model_id, package, gpu and 0)

    return Changed(disk, place=place)


def _read_half(reader: Any) -> Changed:
    async def read() -> Any:
        reading = await reader.read()
        if reading is None:
            return None
        devices = {
            device: replace(seen, used_bytes=seen.used_bytes // 2)
            for device, seen in reading.devices.items()
        }
        return replace(reading, devices=devices)

    return Changed(reader, read=read)


def _release_at_once(artifacts: Any) -> Changed:
    async def fetch(*args: Any, **kwargs: Any) -> Any:
        artifact, use = await artifacts.fetch(*args, **kwargs)
        artifacts.release(artifact)
        return artifact, use

    return Changed(artifacts, fetch=fetch, release=bool)


def _refuse_for_good(artifacts: Any) -> Changed:
    refused: dict[Any, AdapterError] = {}

    async def fetch(key: Any, *args: Any, **kwargs: Any) -> Any:
        if key in refused:
            raise refused[key]
        try:
            return await artifacts.fetch(key, *args, **kwargs)
        except AdapterError as error:
            refused[key] = error
            raise

    return Changed(artifacts, fetch=fetch)


PORTS = [
    Fault(
        "an unload is answered before Triton has let go",
        "the next load does not find the memory that the last unload promised",
        _change_port("triton", lambda triton: Changed(triton, wait_gone=_returns(value=set()))),
    ),
    Fault(
        "of a package the entry alone is unloaded",
        "its helpers stay in Triton, with their memory",
        _change_port("triton", _skip_parts("unload")),
    ),
    Fault(
        "of a package the entry alone is loaded",
        "Python code calls models that Triton does not have",
        _change_port("triton", _skip_parts("load")),
    ),
    Fault(
        "the unload of a package waits for its entry alone",
        "its steps are still there when the unload is answered",
        _change_port("triton", _wait_for_entries_alone),
    ),
    Fault(
        "lost models are not looked for",
        "models that Triton has lost are served for ever",
        _change_port("triton", _remember_loads),
    ),
    Fault(
        "what is not ready is adopted",
        "models that Triton does not serve are served",
        _change_port("triton", lambda triton: Changed(triton, ready=triton.present)),
    ),
    Fault(
        "a failed load is not unloaded",
        "Triton goes on with a load whose caller was told that it failed, and serves it in the end",
        _change_port("triton", _unload_good_loads_alone),
    ),
    Fault(
        "the death of a process is not noticed",
        "a model without a process is given one request after the other",
        _change_port(
            "processes", lambda processes: Changed(processes, instances=_returns(value={}))
        ),
    ),
    Fault(
        "an unload is answered before the processes have ended",
        "a process that survives keeps the memory, and nobody ends it",
        _change_port(
            "processes", lambda processes: Changed(processes, wait=_returns(value=frozenset()))
        ),
    ),
    Fault(
        "Triton is not restarted when all its threads hang",
        "no model can be loaded any more",
        _change_port("server", lambda server: Changed(server, restart=_returns(value=None))),
    ),
    Fault(
        "an unload leaves the folders",
        "the repository fills with folders that no model has",
        _change_port("disk", lambda disk: Changed(disk, remove=_returns(value=None))),
    ),
    Fault(
        "a load is not noted for the next run",
        "an adapter that is started again unloads what it should adopt",
        _change_port("disk", lambda disk: Changed(disk, confirm=_returns(value=None))),
    ),
    Fault(
        "a load of V2 does not look whether the files have changed",
        "the old files are served, and the caller was told that the new ones are",
        _change_port("disk", lambda disk: Changed(disk, has_changed=_returns(value=False))),
    ),
    Fault(
        "a model is put on another GPU than the one that has its reservation",
        "GPU 0 runs out of memory",
        _change_port("disk", _place_on_first),
    ),
    Fault(
        "half of the memory in use is not seen",
        "models are let in to memory that others have",
        _change_port("memory", _read_half),
    ),
    Fault(
        "the files of a model that is gone stay in use",
        "the disk fills with models that are not loaded",
        _change_port("artifacts", lambda artifacts: Changed(artifacts, release=bool)),
    ),
    Fault(
        "files in use leave the disk",
        "a model cannot be loaded again, or is loaded by halves",
        _change_port("artifacts", _release_at_once),
    ),
    Fault(
        "a store that refused once refuses for good",
        "a model is refused after its permissions were mended",
        _change_port("artifacts", _refuse_for_good),
    ),
    Fault(
        "models are forgotten when Triton exits",
        "404 for good after a restart of Triton, though they were to come back",
        settings=lambda settings: replace(settings, loads_again=False),
    ),
    Fault(
        "a load may take ten times as long",
        "a load that hangs keeps its caller long after the limit",
        settings=lambda settings: replace(settings, load_seconds=10 * settings.load_seconds),
    ),
    Fault(
        "a pinned model is evicted",
        "a model that only others call is gone",
        terms=lambda terms: replace(terms, pin=()),
    ),
    Fault(
        "a call waits for as long as its model takes",
        "callers hang behind a store that is slow",
        terms=lambda terms: replace(terms, model_wait_seconds=10 * terms.model_wait_seconds),
    ),
    Fault(
        "a model counts as idle at once",
        "the next call loads it again",
        terms=lambda terms: replace(terms, idle_unload_seconds=1.0),
    ),
]
