"""Reads the variables of ModelMesh's own Triton adapter, and checks what a mesh would refuse.

The names and their defaults are those of kserve/modelmesh-runtime-adapter (docs/migration.md).
"""

from collections.abc import Iterator, Mapping

from adapter.core.byte_sizes import format_size, parse_size

# A mesh counts in units of 8 KiB, in 32 bits with a sign.
MAX_SIZE_BYTES = 2**44
# Below so much capacity, or so many models of default size, a mesh does not start.
_MIN_BYTES = 512 * 2**20
_MIN_MODELS = 2
_ENOUGH_MODELS = 10

# Variables whose values are those of a setting.
_SAME_VALUES = {
    "LOADING_CONCURRENCY": "load_concurrency",
    "DEFAULT_MODELSIZE": "modelmesh_default_size",
    "MODELSIZE_MULTIPLIER": "size_factor",
    "LIMIT_PER_MODEL_CONCURRENCY": "modelmesh_model_concurrency",
}
# The memory of Triton's container, and the part that Triton takes, as in ModelMesh's own adapter.
_MEMORY = "CONTAINER_MEM_REQ_BYTES"
_BUFFER = "MEM_BUFFER_BYTES"
_BUFFER_BYTES = 256 * 2**20
_FALSE = frozenset({"", "0", "f", "F", "false", "False", "FALSE"})


def inherited(environ: Mapping[str, str], listen_host: str) -> Iterator[tuple[str, str, object]]:
    """Yield each variable that stands for a setting: its name, the setting, and the value."""
    settings = [*_find_settings(environ, listen_host)]
    yield from settings
    if settings:  # a mesh loads again what Triton has lost
        yield settings[0][0], "on_triton_restart", "forget"


def _find_settings(
    environ: Mapping[str, str], listen_host: str
) -> Iterator[tuple[str, str, object]]:
    """Yield what the variables themselves say, as `inherited` does."""
    # Kubernetes sets ADAPTER_PORT=tcp://... beside a Service called adapter
    if (port := environ.get("ADAPTER_PORT")) and not port.startswith(("tcp://", "udp://")):
        yield "ADAPTER_PORT", "grpc", f"{listen_host}:{port}"
    if port := environ.get("RUNTIME_PORT"):
        yield "RUNTIME_PORT", "triton_grpc", f"127.0.0.1:{port}"
    for variable, setting in _SAME_VALUES.items():
        if value := environ.get(variable):
            yield variable, setting, value
    if value := environ.get("LOADTIME_TIMEOUT"):
        yield "LOADTIME_TIMEOUT", "load_timeout_seconds", _to_seconds(value)
    capacity = _compute_capacity(environ)
    if capacity is not None:
        yield _MEMORY, "modelmesh_capacity", capacity
    if root := environ.get("ROOT_MODEL_DIR"):
        yield "ROOT_MODEL_DIR", "repository", f"{root}/_triton_models"
        yield "ROOT_MODEL_DIR", "model_roots", f"/opt/ml/models:/models:{root}"


def problems(environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with variables that are no settings."""
    texts = _find_memory_problems(environ)
    value = environ.get("USE_EMBEDDED_PULLER", "")
    if value not in _FALSE:
        texts.append(
            f"environment USE_EMBEDDED_PULLER: {value!r}: this adapter has no puller; "
            "use the puller of the controller (no builtInAdapter)"
        )
    return texts


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Return which variables are set in vain, and why."""
    if not environ.get("MAX_CONC_KERAS_CONV_PROCS"):
        return []
    return ["environment MAX_CONC_KERAS_CONV_PROCS: ignored: Keras files are not converted here"]


def _find_memory_problems(environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the memory of Triton's container, and with Triton's part of it."""
    texts = []
    sizes = {_MEMORY: 0, _BUFFER: _BUFFER_BYTES}
    for name in sizes:
        if text := environ.get(name):
            try:
                sizes[name] = parse_size(text)
            except ValueError as error:
                texts.append(f"{name}: {text!r}: {error}")
    if not texts and environ.get(_MEMORY) and sizes[_MEMORY] <= sizes[_BUFFER]:
        texts.append(
            f"{_MEMORY}: {environ[_MEMORY]!r}: is not more than {_BUFFER} "
            f"({format_size(sizes[_BUFFER])}), which Triton itself takes"
        )
    return texts


def _compute_capacity(environ: Mapping[str, str]) -> int | None:
    """Return the memory that is left for models; None if it is not set, or has a problem."""
    text = environ.get(_MEMORY)
    if not text or _find_memory_problems(environ):
        return None
    buffer = environ.get(_BUFFER)
    return parse_size(text) - (parse_size(buffer) if buffer else _BUFFER_BYTES)


def refuse_capacity(capacity_bytes: int, default_size_bytes: int) -> None:
    """Raise ValueError, with the reason, if a mesh would not start with these values."""
    enough_bytes = min(_MIN_BYTES, _ENOUGH_MODELS * default_size_bytes)
    min_bytes = max(_MIN_MODELS * default_size_bytes, enough_bytes)
    if capacity_bytes >= MAX_SIZE_BYTES:
        raise ValueError(f"ModelMesh cannot count {format_size(capacity_bytes)} of capacity")
    if capacity_bytes < min_bytes:
        raise ValueError(
            f"leaves a capacity of {format_size(capacity_bytes)}, and with models of "
            f"{format_size(default_size_bytes)} by default ModelMesh does not start below "
            f"{format_size(min_bytes)}"
        )


def _to_seconds(text: str) -> object:
    """Convert milliseconds; a text that is no number is judged by the setting's own rule."""
    try:
        return int(text) / 1000
    except ValueError:
        return text
