"""Write the reference pages of docs/ from the code, or with --check say which are stale."""

import argparse
import ast
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from adapter.core import versions
from adapter.core.calls import NOT_STARTED, RPC_NOT_STARTED
from adapter.core.memory import HOST, DeviceState
from adapter.core.registry import Registry
from adapter.core.states import TRANSITIONS, ModelState
from adapter.frontends.status import ANSWERS
from adapter.relay.stream import FOLLOWS
from adapter.settings import GROUPS, SECRETS, Settings, as_text
from adapter.telemetry.gauges import ModelCollector, ScrapedState
from adapter.telemetry.log import EVENTS
from adapter.telemetry.metrics import Metrics, about
from adapter.triton.connection import NEXT, Event
from adapter.triton.connection import State as Upstream

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TRITON = DOCS / "triton.md"
WRITTEN_BY = "<!-- written by scripts/gen_docs.py: change the code, then run it -->\n\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def settings_page() -> str:
    groups = "".join(
        f"\n## {title[:1].upper()}{title[1:]}\n\n{settings_table(title, names)}"
        for title, names in GROUPS.items()
    )
    return (
        "# Settings\n\n"
        "The setting `memory_limit` is the flag `--memory-limit`, the variable "
        "`ADAPTER_MEMORY_LIMIT`, and the key `memory_limit` of the file; so for all others. "
        f"{spell(SECRETS)} has the variable alone.\n\n"
        "Flags override the environment, which overrides the file (`--config FILE` or "
        "`ADAPTER_CONFIG`, in YAML). The file overrides the [inherited names](#inherited-names), "
        "which override the defaults. An empty variable counts as not set. An unknown "
        "`ADAPTER_` variable or key is an error.\n\n"
        "`triton-adapter check-config` prints every value and where it came from. "
        "`triton-adapter schema` prints the JSON schema of the file, for an editor.\n\n"
        "Sizes are bytes or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB. Flags of "
        "settings that take several values are given once for each; in the file they are lists."
        "\n\n"
        + EXAMPLE.rstrip("\n")
        + "\n"
        + groups
        + "\n## Inherited names\n\n"
        + table(["variable", "sets"], INHERITED)
    )


def spell(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def settings_table(title: str, names: Sequence[str]) -> str:
    """Write the settings of a group, each with an anchor of its name. One that is named as the
    group is has the anchor of the heading.
    """
    fields = Settings.model_fields
    rows = [
        [
            f"`{name}`" if name == title.lower() else f'<a id="{name}"></a>`{name}`',
            as_text(name, fields[name].default),
            str(fields[name].description),
        ]
        for name in names
    ]
    return table(["setting", "default", "meaning"], rows)


# A test runs it, as every block of the pages.
EXAMPLE = """\
A file, combined with a variable and a flag:

```sh
cat > adapter.yaml <<'END'
http: 127.0.0.1:8080
grpc: unix:/run/adapter/grpc.sock
model_roots: [/models, /opt/ml/models]
memory_limit: 8GiB
triton: embedded
triton_args: [--log-verbose=1, --model-load-thread-count=8]
END
ADAPTER_LOG_LEVEL=debug .venv/bin/triton-adapter check-config \\
  --config adapter.yaml --memory-reserve=10%
```

"""

INHERITED = [
    ["`SAGEMAKER_BIND_TO_PORT`", "the port of `http`"],
    [
        "`SAGEMAKER_SAFE_PORT_RANGE`",
        "the ports of `admin`, `grpc` and of an embedded Triton: the first free ones",
    ],
    [
        "`SAGEMAKER_TRITON_DEFAULT_MODEL_NAME`",
        "`single_model`: that folder of /opt/ml/model, unless `SAGEMAKER_MULTI_MODEL` is `true`",
    ],
    ["`SAGEMAKER_MULTI_MODEL`", "`false` alone: `single_model` is /opt/ml/model"],
    ["`SAGEMAKER_TRITON_ALLOW_GRPC`", "`grpc` and `grpc_data`: `false` is off"],
    ["`SAGEMAKER_TRITON_GRPC_PORT`", "the port of `grpc`"],
    ["`SAGEMAKER_TRITON_ALLOW_METRICS`", "the address of `admin`: `false` is 127.0.0.1"],
    ["`SAGEMAKER_TRITON_METRICS_PORT`", "the port of `admin`, which has /metrics"],
    ["`SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT`", "`memory_reserve`: 0.8 leaves 20%"],
    *(
        [f"`SAGEMAKER_TRITON_{name}`", f"`triton_args`: `{option}`"]
        for name, option in (
            ("THREAD_COUNT", "--http-thread-count"),
            ("BUFFER_MANAGER_THREAD_COUNT", "--buffer-manager-thread-count"),
            ("LOG_VERBOSE", "--log-verbose"),
            ("LOG_INFO", "--log-info"),
            ("LOG_WARNING", "--log-warning"),
            ("LOG_ERROR", "--log-error"),
            ("SHM_DEFAULT_BYTE_SIZE", "--backend-config=python,shm-default-byte-size"),
            ("SHM_GROWTH_BYTE_SIZE", "--backend-config=python,shm-growth-byte-size"),
            ("TENSORFLOW_VERSION", "--backend-config=tensorflow,version"),
        )
    ),
    [
        "`SAGEMAKER_TRITON_ADDITIONAL_ARGS`",
        "`triton_args`, behind those above; `--load-model`: the names in `single_model`",
    ],
    ["`SAGEMAKER_TRITON_INFERENCE_TYPE`", "`inference_type`"],
    [
        "`SAGEMAKER_TRITON_OVERRIDE_PING_MODE`, `SAGEMAKER_TRITON_PING_MODE`",
        "nothing: ignored with a warning, /ping waits for the single model alone",
    ],
    [
        "`SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING`",
        "nothing: ignored with a warning, packages never share names",
    ],
    ["`SAGEMAKER_MAX_PAYLOAD_IN_MB`", "`max_body_bytes`, in MiB"],
    ["`SAGEMAKER_MAX_REQUEST_SIZE`", "`max_body_bytes`"],
    [
        "`SAGEMAKER_MODEL_SERVER_TIMEOUT`, `SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS`",
        "`infer_timeout_seconds`",
    ],
    ["`SAGEMAKER_STARTUP_TIMEOUT`", "`start_timeout_seconds`"],
    *(
        [f"`SAGEMAKER_{name}`", "nothing: ignored with a warning"]
        for name in ("NUM_MODEL_WORKERS", "DEFAULT_INVOCATIONS_ACCEPT", "GUNICORN_...", "TFS_...")
    ),
    ["`RUNTIME_PORT`", "the port of `triton_grpc`"],
    ["`ADAPTER_PORT`", "the port of `grpc`, at `listen_host`"],
    ["`CONTAINER_MEM_REQ_BYTES`", "`modelmesh_capacity`, less `MEM_BUFFER_BYTES`"],
    ["`MEM_BUFFER_BYTES`", "what Triton itself takes of the memory above; 256 MiB if not set"],
    ["`LOADING_CONCURRENCY`", "`load_concurrency`"],
    ["`LOADTIME_TIMEOUT`", "`load_timeout_seconds`, in milliseconds"],
    ["`DEFAULT_MODELSIZE`", "`modelmesh_default_size`"],
    ["`MODELSIZE_MULTIPLIER`", "`size_factor`"],
    ["`RUNTIME_VERSION`", "nothing: ModelMesh gets the version of Triton"],
    ["`LIMIT_PER_MODEL_CONCURRENCY`", "`modelmesh_model_concurrency`"],
    ["`ROOT_MODEL_DIR`", "`repository`, as its folder `_triton_models`, and one more model root"],
    ["`USE_EMBEDDED_PULLER`", "nothing: `true` is refused, this adapter has no puller"],
    ["`MAX_CONC_KERAS_CONV_PROCS`", "nothing: ignored with a warning"],
]


def events_page() -> str:
    rows = [[f"`{name}`", meaning] for name, meaning in sorted(EVENTS.items())]
    return (
        "# Events\n\n"
        "The log has one event a line, on stdout. `log_format` chooses JSON, with `time`, "
        "`level`, `logger`, `event` and the event's own fields, or text.\n\n"
        + table(["event", "meaning"], rows)
    )


# Codes that stand for no class of the table.
OTHER_ANSWERS = [
    [
        *("500", "INTERNAL", "`InternalError`", "-", "500 `InternalFailure`"),
        *("a bug", "read the log and report it"),
    ]
]


def errors_page() -> str:
    return (
        "# Errors\n\n"
        'Every error of the `http` listener is JSON: `{"error": TEXT, "code": CODE, '
        '"model_name": NAME or null}`. Programs should read `code` and the status; `error` may '
        "change.\n\n"
        "Status 507 and `ModelTooLarge` add six members, null if unknown: `needed_bytes`, "
        "`free_bytes`, `limit_bytes`, `device`, `needs_more_than_bytes` and `matched`. "
        "`needs_more_than_bytes` is a bound: with that much a load of it was ended or has failed. "
        "`matched` has the words of the "
        "failure text that mean out of memory. [memory.md](memory.md) says which failures become "
        "507.\n\n"
        "The gRPC listeners return the code of the second column. If the model raised UNKNOWN, "
        "UNIMPLEMENTED, ALREADY_EXISTS, CANCELLED or UNAVAILABLE, they return that. The text is "
        "`CODE: TEXT`, cut after 7 KiB. For an unknown model Triton's text comes first, except "
        "for [ModelMesh](modelmesh.md#what-modelmesh-does-with-a-code). Within a stream the text "
        "is the `error_message` of a message, not cut.\n\n"
        f"`{NOT_STARTED}: 1` (gRPC: trailing metadata `{RPC_NOT_STARTED}: 1`) marks each 503 of "
        "which Triton received nothing. Resending is safe, to another machine too. These are "
        "`NotStarted`, `NoRoom`, `StoreUnavailable`, `TooManyWaiting`, `TooManyConnections`, and "
        "`BackendUnavailable` if Triton was unreachable or the adapter starts or stops.\n\n"
        "The class is the one in `adapter/errors.py`; `StubDied` is a kind of `InferenceFailed`."
        "\n\n"
        + table(
            ["status", "gRPC", "code", "class", "InvokeEndpoint", "when", "what to do"],
            sorted([*map(error_row, ANSWERS), *OTHER_ANSWERS], key=lambda row: row[0]),
        )
    )


def error_row(kind: type[BaseException]) -> list[str]:
    answer = ANSWERS[kind]
    codes = [str(answer.status), answer.grpc.name, f"`{answer.code}`", f"`{kind.__name__}`"]
    return [*codes, f"{answer.aws[0]} `{answer.aws[1]}`", answer.when, answer.remedy]


def metrics_page() -> str:
    return (
        "# Metrics\n\n"
        "`/metrics` of the listener `admin`, or `metrics` where that is open, has these. They are "
        "OpenMetrics if the client asks for it, else Prometheus's text, compressed where "
        "accepted. Only the labels of `triton_adapter_model_...` name models. A counter or a "
        "histogram with labels appears with its first event.\n\n"
        + table(["metric", "type", "labels", "meaning", "set by"], metric_rows())
        + "\n## What ModelMesh's metrics ask, of one pod\n\n"
        "A mesh has metrics of its own ([modelmesh-serving](https://github.com/kserve/modelmesh-serving"
        "/blob/main/docs/monitoring.md)); these are ours to the same questions. Only the mesh "
        "counts by deployment and in its own queues.\n\n"
        + table(["`modelmesh_...`", "here"], OF_MODELMESH)
    )


OF_MODELMESH = [
    ["`api_request_milliseconds`", "`triton_adapter_request_seconds`"],
    ["`invoke_model_milliseconds`", "`triton_adapter_upstream_seconds`"],
    ["`request_size_bytes`, `response_size_bytes`", "-"],
    ["`cache_miss_milliseconds`", "`triton_adapter_operation_seconds` of loads: the wait for one"],
    ["`loadmodel_milliseconds`", "`triton_adapter_operation_seconds` of loads"],
    ["`loadmodel_failure`", "`triton_adapter_operations_total` of loads, by `outcome`"],
    ["`unloadmodel_milliseconds`", "`triton_adapter_operation_seconds` of unloads"],
    [
        "`unloadmodel_failure`, `unloadmodel_attempt_failure`",
        "`triton_adapter_operations_total` of unloads, by `outcome`",
    ],
    ["`req_queue_delay_milliseconds`", "Triton's `nv_inference_queue_duration_us`"],
    ["`loading_queue_delay_milliseconds`", "`triton_adapter_load_wait_seconds`"],
    ["`model_sizing_milliseconds`", "-, part of the load"],
    [
        "`age_at_eviction_milliseconds`",
        "`triton_adapter_least_recently_used_seconds` at that time",
    ],
    ["`loaded_model_size_bytes`", "`triton_adapter_loaded_model_bytes`"],
    ["`models_loaded_total`, `instance_models_total`", "`triton_adapter_models`"],
    ["`models_with_failure_total`, `models_managed_total`", "-, of the deployment"],
    [
        "`instance_lru_seconds`, `instance_lru_age_seconds`",
        "`triton_adapter_least_recently_used_seconds`",
    ],
    ["`instance_capacity_bytes`", "`triton_adapter_memory_limit_bytes`"],
    [
        "`instance_used_bytes`, `instance_used_bps`",
        (
            "`triton_adapter_memory_used_by_models_bytes` and `triton_adapter_memory_used_bytes`,"
            " over the limit"
        ),
    ],
]


def metric_rows() -> list[list[str]]:
    metrics = Metrics()
    counted = [kept for kept in vars(metrics).values() if isinstance(kept, MetricWrapperBase)]
    # prometheus_client tells the labels of a metric only by this attribute
    labels = {name: kept._labelnames for kept in counted for name in names_of(kept)}  # noqa: SLF001
    device = DeviceState(0, 0, 0, 0, 0, 0, 0, None)
    metrics.bind(
        ScrapedState(
            abandoned=lambda: 0,
            models=lambda: dict.fromkeys(ModelState, 0),
            devices=lambda: {HOST: device},
            gpu_unread=lambda: False,
            triton_live=lambda: True,
            ready=lambda: True,
            lost_lines=lambda: 0,
            wanted=dict[str, int],
            idle_seconds=lambda: 1.0,
            about=dict.fromkeys(about(""), ""),
        ),
        ModelCollector(Registry(lambda: 0.0), lambda _: {}),
    )
    setters = find_setters(metrics)
    rows = []
    for family in metrics.registry.collect():
        name = name_of(family)
        known = labels.get(family.name, getattr(family, "_labelnames", ()))
        shown = ", ".join(f"`{label}`" for label in known)
        values = [value for sample in family.samples for value in sample.labels.values()]
        if family.type == "gauge" and any(values):
            *others, label = family.samples[0].labels
            values = [sample.labels[label] for sample in family.samples]
            shown = "".join(f"`{other}`, " for other in others) + f"`{label}`: " + ", ".join(values)
        meaning = family.documentation
        rows.append(
            [f"`{name}`", family.type, shown or "none", meaning, setters.get(name, "a scrape")]
        )
    return rows


def find_setters(metrics: Metrics) -> dict[str, str]:
    """Return the modules that set each metric, by themselves or by a method of Metrics."""
    texts = {
        str(path.relative_to(ROOT / "adapter")): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "adapter").rglob("*.py"))
    }
    methods = {
        name: inspect.getsource(method)
        for name, method in vars(Metrics).items()
        if inspect.isfunction(method) and name != "__init__"
    }
    setters = {name_of(family): "each request" for family in metrics.traffic.collect()}
    for attribute, kept in vars(metrics).items():
        if isinstance(kept, MetricWrapperBase):
            by_method = [name for name, code in methods.items() if f"self.{attribute}." in code]
            use = re.compile(rf"metrics\.({'|'.join([attribute, *by_method])})\b")
            found = [f"`{path}`" for path, text in texts.items() if use.search(text)]
            setters |= {name_of(family): ", ".join(found) for family in kept.describe()}
    return setters


def name_of(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def names_of(metric: MetricWrapperBase) -> list[str]:
    return [family.name for family in metric.describe()]


def drawing(arrows: list[str]) -> str:
    lines = "".join(f"    {arrow}\n" for arrow in arrows)
    return f"```mermaid\nstateDiagram-v2\n{lines}```\n\n"


def arrows_of(transitions: Mapping[tuple[Enum | None, Enum], Enum | None]) -> list[str]:
    """Return an arrow for each row of a table of states. The dot is None, an absent model."""
    return [
        f"{before.value if before else '[*]'} --> {after.value if after else '[*]'}: {event.value}"
        for (before, event), after in transitions.items()
    ]


_TAKEN_DOWN = "takes down what is left, then begins"
_ENDS_LOAD = "ends the load, then 200"
_WAITS = "waits for the unload, then begins"
_ANOTHER_NAME = "begins, under another name in Triton"


def states_page() -> str:
    connection = [
        f"{Upstream(before).name} --> {Upstream(after).name}: {Event(event).name}"
        for before, afters in NEXT.items()
        for event, after in afters.items()
    ]
    request = [
        f"{stage.name} --> {after.name}"
        for stage, stages in FOLLOWS.items()
        for after in sorted(stages - {stage}, key=list(FOLLOWS).index)
    ]
    return (
        "# States\n\n"
        "## A model\n\n"
        "From `adapter/core/states.py`. The dots are a model that is not loaded. An event without "
        "an arrow is a bug: it raises, and nothing changes.\n\n"
        + drawing(arrows_of(TRANSITIONS))
        + table(
            ["state", "listed", "get and invoke", "load", "unload", "a call of its store"],
            [
                ["none", "no", "404", "begins", "404", "begins the load"],
                ["PREPARING", "no", "503", "409", _ENDS_LOAD, "waits"],
                ["LOADING", "no", "503", "409", _ENDS_LOAD, "waits"],
                ["READY", "yes", "served", "409", "begins", "is answered: `hit`"],
                ["DEAD", "no", "404", _TAKEN_DOWN, "begins", "has it unloaded, then loaded"],
                ["UNLOADING", "no", "404", _WAITS, "waits, then 404", "waits, and loads it again"],
                ["LOST", "no", "503", "409", "the model does not come back", "loads it again"],
                ["STUCK", "no", "404", _ANOTHER_NAME, "504", "begins the load"],
            ],
        )
        + "\nThe files of a model of a store are fetched while it is PREPARING. They stay on disk "
        "until its load is undone. After that they may still be in the disk cache, where a fetch "
        "finds them.\n\n"
        "If Triton exits while a model is PREPARING, its load waits for the next Triton. If it "
        "exits while the model is LOADING, the load fails. A call of a store then tries once "
        "more.\n" + "\n## A connection to Triton's HTTP port\n\n"
        "From `adapter/triton/connection.py`. A connection serves one call at a time. It "
        "is closed after an answer that says so, or that began before the whole request was sent. "
        "Any state becomes BROKEN, and the connection is closed, when\n\n"
        "- Triton sends unexpected bytes, or bytes that are not HTTP;\n"
        "- a caller or a time limit ends a call before Triton has received all of it;\n"
        "- the connection is lost.\n\n" + drawing(connection) + "## A request over gRPC\n\n"
        "From `adapter/relay/stream.py`: the stages of a request in the HTTP/2 relay. Its two "
        "streams, to the client and to Triton, have the states of RFC 9113 section 5.1.\n\n"
        + drawing(request)
        + table(["stage", "meaning"], [[stage.name, stage.value] for stage in FOLLOWS])
    )


def modules_page() -> str:
    parts: dict[str, list[list[str]]] = {}
    for path in sorted((ROOT / "adapter").rglob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if said and "_proto" not in path.parts:
            place = path.relative_to(ROOT / "adapter")
            part = f"{place.parts[0]}/" if len(place.parts) > 1 else "On top"
            parts.setdefault(part, []).append([f"`{place}`", first_sentence(said)])
    return (
        "# Modules\n\n"
        "This page has the first sentence of each module of `adapter`. "
        "[architecture.md](architecture.md) says how they work together.\n"
        + "".join(
            f"\n## {part}\n\n" + table(["module", "what it does"], rows)
            for part, rows in parts.items()
        )
    )


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s(?=[A-Z])", paragraph)[0].removesuffix(".")


def versions_part() -> str:
    """Return what docs/triton.md has of versions between two comments."""
    rows = [
        [
            numbered(change.since),
            change.what + ("" if change.known is versions.Known.SEEN else " (read)"),
            change.here,
        ]
        for change in sorted(versions.CHANGES, key=lambda change: change.since)
    ]
    tested = "was run" if versions.IS_DEFAULT_TESTED else "was never run"
    default = (
        "The chart, `compose.yaml`, the Dockerfile and the examples name"
        f" `{versions.DEFAULT_IMAGE}`. The test suite {tested} on it.\n\n"
    )
    return default + table(["since", "Triton", "the adapter"], rows)


_OF_TWO_IMAGES = (2, 59)  # of 25.06 and 25.07; all others are of one


def numbered(version: versions.Version) -> str:
    """Return the version with the month of its image."""
    major, minor = version
    year, month = divmod(minor + 246 + (version > _OF_TWO_IMAGES), 12)
    return f"{major}.{minor} ({year}.{month + 1:02})"


def with_part(path: Path, name: str, text: str) -> str:
    """Return the page with `text` between the comments that name the part."""
    begin = f"<!-- {name}, written by scripts/gen_docs.py from adapter/core/versions.py -->\n\n"
    end = f"\n<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}" if found else before


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "events.md": events_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "states.md": states_page,
    "modules.md": modules_page,
}


def stale(path: Path, wanted: str) -> str:
    """A diff from the file to what it should be; empty when they are the same."""
    name = path.relative_to(ROOT)
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = found.splitlines(keepends=True), wanted.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, str(name), "as it should be"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    is_check = parser.parse_args().check
    files = {DOCS / name: WRITTEN_BY + page() for name, page in PAGES.items()}
    files[TRITON] = with_part(TRITON, "versions", versions_part())
    diffs = [diff for path, text in files.items() if (diff := stale(path, text))]
    if is_check:
        print("".join(diffs), end="")
        return 1 if diffs else 0
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
