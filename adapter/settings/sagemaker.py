"""Reads the variables of SageMaker (docs/containers.md, SageMaker).

They are those of its container contract, of Triton's own serve script there, and of the toolkits of
other containers.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

# where SageMaker unpacks the one model of a single-model endpoint
_ONE_MODEL = "/opt/ml/model"
_TRITON = "SAGEMAKER_TRITON_"
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - SageMaker calls from outside
_LOOPBACK = "127.0.0.1"
_BOUND = "SAGEMAKER_BIND_TO_PORT"
_RANGE = "SAGEMAKER_SAFE_PORT_RANGE"
_ALLOW_GRPC = f"{_TRITON}ALLOW_GRPC"
_GRPC_PORT = f"{_TRITON}GRPC_PORT"
_ALLOW_METRICS = f"{_TRITON}ALLOW_METRICS"
_METRICS_PORT = f"{_TRITON}METRICS_PORT"
_GPU_LIMIT = f"{_TRITON}MODEL_LOAD_GPU_LIMIT"
_PAYLOAD = "SAGEMAKER_MAX_PAYLOAD_IN_MB"
_MORE_ARGUMENTS = f"{_TRITON}ADDITIONAL_ARGS"
_DEFAULT_MODEL = f"{_TRITON}DEFAULT_MODEL_NAME"
_LOAD_MODEL = "--load-model"

# Variables whose values are those of a setting.
_SAME_VALUES = {
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_body_bytes",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": "infer_timeout_seconds",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "infer_timeout_seconds",
    "SAGEMAKER_STARTUP_TIMEOUT": "start_timeout_seconds",
    f"{_TRITON}INFERENCE_TYPE": "inference_type",
}
# Variables that the serve script of Triton's container turns into options.
_OPTIONS = {
    f"{_TRITON}BUFFER_MANAGER_THREAD_COUNT": "--buffer-manager-thread-count=",
    f"{_TRITON}THREAD_COUNT": "--http-thread-count=",
    f"{_TRITON}LOG_VERBOSE": "--log-verbose=",
    f"{_TRITON}LOG_INFO": "--log-info=",
    f"{_TRITON}LOG_WARNING": "--log-warning=",
    f"{_TRITON}LOG_ERROR": "--log-error=",
    f"{_TRITON}SHM_DEFAULT_BYTE_SIZE": "--backend-config=python,shm-default-byte-size=",
    f"{_TRITON}SHM_GROWTH_BYTE_SIZE": "--backend-config=python,shm-growth-byte-size=",
    f"{_TRITON}TENSORFLOW_VERSION": "--backend-config=tensorflow,version=",
}
# How Triton itself writes true and false.
_SWITCH = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}

_PING_REASON = "/ping waits for the single model and depends on no other"
_IGNORED = {
    f"{_TRITON}OVERRIDE_PING_MODE": _PING_REASON,
    f"{_TRITON}PING_MODE": _PING_REASON,
    f"{_TRITON}DISABLE_MODEL_NAMESPACING": "packages never share names here",
    "SAGEMAKER_NUM_MODEL_WORKERS": "how many instances a model has is for its config.pbtxt to say",
    "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "calls without Accept get the answer of V2",
}
_OTHER_SERVERS = ("SAGEMAKER_GUNICORN_", "SAGEMAKER_TFS_")
_CHOICES = {
    f"{_TRITON}OVERRIDE_PING_MODE": ("ready", "live"),
    f"{_TRITON}PING_MODE": ("ready", "live"),
    _ALLOW_GRPC: tuple(_SWITCH),
    _ALLOW_METRICS: tuple(_SWITCH),
}
_KNOWN = frozenset(
    {*_SAME_VALUES, *_OPTIONS, *_IGNORED, *_CHOICES}
    | {
        _GRPC_PORT,
        _METRICS_PORT,
        _GPU_LIMIT,
        _MORE_ARGUMENTS,
        _DEFAULT_MODEL,
    }
)


def inherited(
    environ: Mapping[str, str], *, is_embedded: bool
) -> Iterator[tuple[str, str, object]]:
    """Yield each variable that stands for a setting: its name, the setting, and the value."""
    yield from _choose_addresses(environ, is_embedded=is_embedded)
    yield from _find_arguments(environ)
    if environ.get("SAGEMAKER_MULTI_MODEL") == "true":
        yield "SAGEMAKER_MULTI_MODEL", "on_triton_restart", "forget"
    for variable, setting in _SAME_VALUES.items():
        if value := environ.get(variable):
            yield variable, setting, value
    if value := environ.get(_PAYLOAD):
        yield _PAYLOAD, "max_body_bytes", f"{value}MiB"
    if (limit := _parse_share(environ)) is not None:
        yield _GPU_LIMIT, "memory_reserve", f"{100 * (1 - limit):g}%" if limit < 1 else 0


def problems(environ: Mapping[str, str], *, is_embedded: bool) -> list[str]:
    """Return what is wrong with the variables."""
    texts = []
    for variable, choices in _CHOICES.items():
        value = environ.get(variable)
        if value and value not in choices:
            texts.append(_explain_problem(environ, variable, f"write {' or '.join(choices)}"))
    if environ.get(_GPU_LIMIT) and _parse_share(environ) is None:
        texts.append(_explain_problem(environ, _GPU_LIMIT, "write a share above 0 and up to 1"))
    texts += _find_word_problems(environ)
    return texts + _find_port_problems(environ, is_embedded=is_embedded)


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Return which variables are ignored, and why."""
    texts = []
    for variable in sorted(environ):
        if not environ[variable]:
            continue
        if reason := _IGNORED.get(variable):
            texts.append(f"environment {variable}: ignored: {reason}")
        elif variable.startswith(_OTHER_SERVERS):
            texts.append(f"environment {variable}: ignored: it is for another server")
        elif variable.startswith(_TRITON) and variable not in _KNOWN:
            texts.append(f"environment {variable}: ignored: no such name is known here")
    return texts


def _choose_addresses(
    environ: Mapping[str, str], *, is_embedded: bool
) -> Iterator[tuple[str, str, object]]:
    """Yield the listeners' addresses: SageMaker gives each of several containers its own ports."""
    placed: dict[str, tuple[str, str]] = {}  # by setting: the variable, and the address
    if port := environ.get(_BOUND):
        placed["http"] = _BOUND, f"{_EVERYWHERE}:{port}"
    if _SWITCH.get(environ.get(_ALLOW_GRPC, "")) is False:
        placed |= {"grpc": (_ALLOW_GRPC, "off"), "grpc_data": (_ALLOW_GRPC, "off")}
    elif port := environ.get(_GRPC_PORT):
        placed["grpc"] = _GRPC_PORT, f"{_EVERYWHERE}:{port}"
    is_seen = _SWITCH.get(environ.get(_ALLOW_METRICS, ""), True)
    hosts = {"admin": _EVERYWHERE if is_seen else _LOOPBACK, "grpc": _EVERYWHERE}
    if port := environ.get(_METRICS_PORT):
        placed["admin"] = _METRICS_PORT, f"{hosts['admin']}:{port}"
    waiting = [setting for setting in _list_listeners(is_embedded) if setting not in placed]
    for setting, free in zip(waiting, _list_free_ports(environ), strict=False):
        placed[setting] = _RANGE, f"{hosts.get(setting, _LOOPBACK)}:{free}"
    if not is_seen:
        placed.setdefault("admin", (_ALLOW_METRICS, f"{_LOOPBACK}:8081"))
    for setting, (variable, address) in placed.items():
        yield variable, setting, address


def _list_listeners(is_embedded: bool) -> tuple[str, ...]:
    """Return the listeners besides `http` that need a port, an embedded Triton's included."""
    triton = ("triton_http", "triton_grpc", "triton_metrics") if is_embedded else ()
    return ("admin", "grpc", *triton)


def _parse_range(environ: Mapping[str, str]) -> range | None:
    """Return the ports that the container may use; None if the range is not set, or malformed."""
    match = re.fullmatch("([0-9]{1,5})-([0-9]{1,5})", environ.get(_RANGE, ""))
    return range(int(match[1]), int(match[2]) + 1) if match else None


def _list_free_ports(environ: Mapping[str, str]) -> list[int]:
    """Return the ports of the range that no variable gives to a listener."""
    taken = {environ.get(name) for name in (_BOUND, _GRPC_PORT, _METRICS_PORT)}
    return [port for port in _parse_range(environ) or () if str(port) not in taken]


def _find_port_problems(environ: Mapping[str, str], *, is_embedded: bool) -> list[str]:
    """Return what is wrong with the range of ports, and with ports outside of it."""
    if not environ.get(_RANGE):
        return []
    if (safe := _parse_range(environ)) is None:
        return [_explain_problem(environ, _RANGE, "write two ports, as in 8081-9000")]
    needed = len(_list_listeners(is_embedded))
    if len(_list_free_ports(environ)) < needed:
        return [_explain_problem(environ, _RANGE, f"too narrow: {needed} free ports are needed")]
    return [
        _explain_problem(environ, variable, f"is outside of {_RANGE}, {environ[_RANGE]}")
        for variable in (_GRPC_PORT, _METRICS_PORT)
        if (port := environ.get(variable, "")).isdecimal() and int(port) not in safe
    ]


def _find_single_model(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable that asks for a single model, and the model's folder."""
    multi_model = environ.get("SAGEMAKER_MULTI_MODEL")
    model = environ.get(_DEFAULT_MODEL)
    if multi_model != "true" and model:
        return _DEFAULT_MODEL, f"{_ONE_MODEL}/{model}"
    return ("SAGEMAKER_MULTI_MODEL", _ONE_MODEL) if multi_model == "false" else None


def _find_arguments(environ: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    """Yield the arguments of tritonserver, and the single model with those that they name."""
    single = _find_single_model(environ)
    variables: list[str] = []
    arguments: list[str] = []
    sources = [single[0]] if single else []
    names = [single[1]] if single else []
    for variable, words in _split_arguments(environ):
        models: list[str] = []
        others = words
        if single:
            models, others = _split_off_models(words)
        # without a default model the package is all of /opt/ml/model, which is loaded anyway
        default = environ.get(_DEFAULT_MODEL)
        if models and default:
            sources.append(variable)
            names += [model for model in models if model != default]
        if others:
            variables.append(variable)
            arguments += others
    if arguments:
        yield ", ".join(variables), "triton_args", shlex.join(arguments)
    if single:
        yield ", ".join(sources), "single_model", names


def _split_arguments(environ: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each variable with arguments of tritonserver, and the arguments.

    A value may hold further arguments behind blanks: the serve script does not quote it.
    """
    options = {**_OPTIONS, _MORE_ARGUMENTS: ""}
    for variable, option in options.items():
        if value := environ.get(variable):
            try:
                yield variable, shlex.split(option + value)
            except ValueError:  # unbalanced quotes; `problems` reports them
                yield variable, [option + value]


def _split_off_models(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the models that `--load-model` names, and the other arguments."""
    models: list[str] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == _LOAD_MODEL:
            models += [model for model in [next(remaining, "")] if model]
        elif word.startswith(f"{_LOAD_MODEL}="):
            models.append(word.removeprefix(f"{_LOAD_MODEL}="))
        else:
            others.append(word)
    return models, others


def _find_word_problems(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the problem of each variable with arguments that no shell could read."""
    for variable in (*_OPTIONS, _MORE_ARGUMENTS):
        try:
            shlex.split(environ.get(variable, ""))
        except ValueError as error:
            yield _explain_problem(environ, variable, f"write it as for a shell: {error}")


def _parse_share(environ: Mapping[str, str]) -> float | None:
    """Return how much of each GPU may be in use; None if it is not set or not a share."""
    try:
        share = float(environ.get(_GPU_LIMIT, ""))
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def _explain_problem(environ: Mapping[str, str], variable: str, rule: str) -> str:
    """Return the text about a variable that breaks a rule, with its value."""
    return f"environment {variable}: {environ[variable]!r}: {rule}"
