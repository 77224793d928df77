"""Declares every setting: its group, its type, its default and what it means."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, Field, SecretStr

from adapter.settings.modelmesh import MAX_SIZE_BYTES
from adapter.settings.rules import EXTERNAL_REPOSITORY, Rules
from adapter.settings.values import (
    Address,
    AnyAddress,
    AnySeconds,
    AnySize,
    Arguments,
    Concurrency,
    Count,
    Endpoints,
    Factor,
    File,
    Folder,
    Hosts,
    KeyLines,
    ListenHost,
    Metavar,
    ModelKeys,
    Models,
    NamePatterns,
    OnOff,
    Passthrough,
    Paths,
    Patterns,
    Seconds,
    Share,
    Size,
    Store,
    TcpAddress,
    Token,
)

_GATHERED_BYTES = 2**26


class Group(StrEnum):
    """Lists the groups of settings in the order of --help."""

    LISTENERS = "listeners"
    TRITON = "Triton"
    MODELS = "models"
    ENDPOINT = "endpoint"
    MEMORY = "memory"
    TIME = "time limits"
    LIMITS = "other limits"
    MODELMESH = "ModelMesh"
    LOG = "log"

    def setting(self, default: object, meaning: str, unset: str = "none") -> Any:
        """Declare a setting of this group. `unset` is what people read in place of None."""
        extra: dict[str, Any] = {"group": self.value, "unset": unset}
        return Field(default=default, description=meaning, json_schema_extra=extra)


class Settings(Rules):
    """Holds every setting, valid as a whole. Defaults are written as a user would write them.

    A field's type has what --help shows for a value (`Metavar`), and tells secrets.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        coerce_numbers_to_str=True,
        hide_input_in_errors=True,  # it may be a token
    )

    listen_host: ListenHost = Group.LISTENERS.setting(
        "127.0.0.1",
        "host of http, grpc and admin unless their own settings name one. 127.0.0.1: for this "
        "machine only; 0.0.0.0: for others over IPv4; :: for others over IPv6 and IPv4, or over "
        "IPv4 alone on a machine without IPv6",
    )
    http: AnyAddress = Group.LISTENERS.setting(
        "127.0.0.1:8080",
        "listener of the SageMaker contract: HOST:PORT, unix:/path or off",
    )
    http_data: AnyAddress = Group.LISTENERS.setting(
        "off",
        "a second HTTP listener, for inference only (SageMaker's invoke, V2): HOST:PORT, "
        "unix:/path or off",
    )
    grpc: AnyAddress = Group.LISTENERS.setting(
        "127.0.0.1:8085",
        "listener of ModelMesh's runtime contract and V2 over gRPC: HOST:PORT, unix:/path or off",
    )
    grpc_data: AnyAddress = Group.LISTENERS.setting(
        "off", "a second gRPC listener, for V2 inference only: HOST:PORT, unix:/path or off"
    )
    admin: AnyAddress = Group.LISTENERS.setting(
        "127.0.0.1:8081",
        "listener of /livez, /readyz, /metrics and so on: HOST:PORT, unix:/path or off",
    )
    metrics: AnyAddress = Group.LISTENERS.setting(
        "off",
        "a listener for /metrics and the probes /livez, /readyz and /startup only, which admin "
        "then no longer serves: HOST:PORT, unix:/path or off",
    )
    allowed_hosts: Hosts = Group.LISTENERS.setting(
        (),
        "hosts whose pages may send requests from a browser, such as that of a web application "
        "behind a proxy; listeners on loopback also accept them as Host, from a proxy on the same "
        "machine that keeps it; in the environment separated by commas",
    )
    control_token: Token | None = Group.LISTENERS.setting(
        None,
        "what callers over TCP must send as `Authorization: Bearer TOKEN` to load, unload, drain "
        "and call mmesh.ModelRuntime; unix sockets need none. Set it in the environment or by "
        "control_token_file",
        "no token is required",
    )
    control_token_file: File | None = Group.LISTENERS.setting(
        None, "file that holds control_token, read at start", "no token is required"
    )
    triton: Literal["external", "embedded"] = Group.TRITON.setting(
        "external",
        "external: Triton runs in another container; embedded: the adapter starts and supervises "
        "its own",
    )
    triton_http: TcpAddress = Group.TRITON.setting(
        "127.0.0.1:8000",
        "where Triton's HTTP endpoint listens; port 0 = any free one, the default of embedded",
    )
    triton_grpc: TcpAddress = Group.TRITON.setting(
        "127.0.0.1:8001",
        "where Triton's gRPC endpoint listens; port 0 = any free one, the default of embedded",
    )
    triton_metrics: TcpAddress = Group.TRITON.setting(
        "127.0.0.1:8002",
        "where Triton's metrics endpoint listens; port 0 = any free one, embedded only",
    )
    tritonserver: File | None = Group.TRITON.setting(
        None,
        "embedded: the binary to start",
        "tritonserver on PATH, else that of the wheel nvidia-pytriton",
    )
    triton_args: Arguments = Group.TRITON.setting(
        (), "embedded: more arguments of tritonserver; in the environment split as a shell does"
    )
    on_triton_restart: Literal["auto", "forget", "reload"] = Group.TRITON.setting(
        "auto",
        "what happens to the models after a restart of Triton. forget: they answer 404, and the "
        "platform loads them again; reload: the adapter loads them again; auto: forget on "
        "SageMaker's multi-model endpoints and under ModelMesh (one of their variables is set, or "
        "ModelMesh has called runtimeStatus), else reload",
    )
    triton_hang_seconds: AnySeconds = Group.TRITON.setting(
        30.0,
        "an embedded Triton that answers neither HTTP nor gRPC for this long is killed and started "
        "again; 0: never",
    )
    passthrough: Passthrough = Group.TRITON.setting(
        (),
        "V2 calls about the whole server that are forwarded to Triton: shared_memory, trace, log; "
        "in the environment separated by commas",
    )
    inline_files: OnOff = Group.TRITON.setting(
        "on",
        "whether a V2 load may carry the model's files, and so code (parameters file:...); off: "
        "such loads are refused",
    )
    model_roots: Paths = Group.MODELS.setting(
        ("/opt/ml/models", "/models"),
        "the only folders that a caller's path may be in, after resolving links; "
        "in the environment separated by colons",
    )
    staging: Literal["symlink", "hardlink", "copy", "upload"] = Group.MODELS.setting(
        "symlink",
        "how Triton gets a package's files. symlink, hardlink, copy: in the repository; links are "
        "relative, copies and hard links are for a Triton that must not see the model roots. "
        "upload: in the load call, for an external Triton that shares no file system",
    )
    repository: Folder | None = Group.MODELS.setting(
        None,
        "model repository that Triton serves and the adapter fills; both must see it at this path, "
        "unless staging is upload",
        f"{EXTERNAL_REPOSITORY}; embedded or upload: a private folder",
    )
    max_unpacked_bytes: Size = Group.MODELS.setting(
        "64GiB", "largest unpacked size of a package that is an archive"
    )
    single_model: Folder | None = Group.MODELS.setting(
        None,
        "the one package that is loaded at start and served at /invocations; models in the folders "
        "beside it to which its config.pbtxt or its Python code refers are loaded with it",
    )
    single_model_helpers: Arguments = Group.MODELS.setting(
        (),
        "names of further folders beside single_model whose models are loaded with it; in the "
        "environment split as a shell does",
    )
    inference_type: Literal["infer", "generate", "generate_stream"] = Group.MODELS.setting(
        "infer",
        "how SageMaker's invocations reach Triton. infer: as inferences; generate: as calls of its "
        "generate extension, one answer each; generate_stream: the same, with answers as events",
    )
    load_at_start: Models = Group.MODELS.setting(
        (),
        "packages to load at start, and again after a restart of Triton: PATH, NAME=PATH, or "
        "FOLDER/* for each in that folder; relative to the first of model_roots unless it begins "
        "with a slash; in the environment separated by colons",
    )
    ready_when: Literal["started", "models"] = Group.MODELS.setting(
        "models",
        "when probes report ready. models: once all of load_at_start are loaded; failed loads are "
        "retried; started: once the adapter accepts loads",
    )
    warm_up: Literal["none", "zeros"] = Group.MODELS.setting(
        "none",
        "what a model computes before its load is answered. none: the model_warmup of its "
        "config.pbtxt, which Triton runs; zeros: without a model_warmup one inference "
        "of zeros and empty strings",
    )
    model_store: Store | None = Group.ENDPOINT.setting(
        None,
        "store of the models that calls name: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://CONTAINER/PREFIX, https://HOST/PATH or a folder; buckets and web servers need the "
        "extra `store`",
        "no endpoint",
    )
    endpoints: Endpoints = Group.ENDPOINT.setting(
        (),
        "more stores, each an endpoint with a name of its own: NAME=URL; in the file also "
        "`NAME: {models: URL}`; in the environment one a line",
    )
    cache_dir: Folder | None = Group.ENDPOINT.setting(
        None,
        "folder for what was fetched from stores, unpacked and kept for later runs; one adapter",
        "triton-adapter in $XDG_CACHE_HOME or ~/.cache",
    )
    cache_limit: Size | None = Group.ENDPOINT.setting(
        None,
        "how large cache_dir may be; the least recently used models are removed, loaded ones never",
        "nine tenths of what is free, beside 1GiB",
    )
    fetch_concurrency: Count = Group.ENDPOINT.setting(
        4, "how many models may be fetched from one store at once; further ones are queued"
    )
    store_timeout_seconds: Seconds = Group.ENDPOINT.setting(
        20.0, "how long a store may be silent, and how long requests to it are retried"
    )
    endpoint_keys: KeyLines = Group.ENDPOINT.setting(
        (),
        "who may call the endpoint: `ACCESS_KEY env:VARIABLE TEAM/*`, a key, where its secret is "
        "(env:VARIABLE or file:PATH) and patterns of TargetModel with * and ?; calls must then be "
        "signed, and other calls over TCP that infer or load need control_token; in the "
        "environment one a line",
    )
    on_demand: bool = Group.ENDPOINT.setting(
        False,  # noqa: FBT003 - the default of the setting
        "V2 calls, REST and gRPC, load their models from the stores as the endpoint's calls do",
    )
    pin: NamePatterns = Group.ENDPOINT.setting(
        (),
        "models that are never evicted or unloaded when idle once a call has loaded them: patterns "
        "of their names, such as team-a/*; in the environment one a line",
    )
    eviction: Literal["gdsf", "lru", "cost"] = Group.ENDPOINT.setting(
        "gdsf",
        "whom to evict. gdsf: whose return costs least per byte and use (cost is another name of "
        "it); lru: the longest unused",
    )
    min_residency_seconds: AnySeconds = Group.ENDPOINT.setting(
        1.0, "how long after its load a model is only evicted for another if nothing else helps"
    )
    preload: ModelKeys = Group.ENDPOINT.setting(
        (),
        "models of the stores to load before the adapter is ready: KEY, or ENDPOINT/KEY; one that "
        "is missing or invalid is only noted at /readyz; in the environment one a line",
    )
    idle_unload_seconds: AnySeconds = Group.ENDPOINT.setting(
        0.0, "how long an on-demand model may be idle before its unload; 0: until room is needed"
    )
    model_wait_seconds: Seconds = Group.ENDPOINT.setting(
        55.0,
        "how long a call waits for its model, whose load continues after that; boto3 waits for 60",
    )
    revalidate_seconds: AnySeconds = Group.ENDPOINT.setting(
        0.0,
        "how often the store is polled for another version of a model that a call has loaded, "
        "which then replaces it; 0: a new version is noticed at the next load",
    )
    memory_source: Literal["auto", "nvml", "triton", "host", "off"] = Group.MEMORY.setting(
        "auto",
        "what measures memory. nvml: the driver, for the GPUs that Triton's metrics name; triton: "
        "Triton's metrics, which lag by seconds; host: the embedded server's processes; off: "
        "nothing; auto: nvml or triton with a GPU, else host with an embedded Triton",
    )
    reported_sizes: bool = Group.MEMORY.setting(
        True,  # noqa: FBT003 - the default of the setting
        "use the GPU memory in Triton's statistics as a model's size; with a GPU, starts an "
        "embedded Triton with its memory tracker",
    )
    memory_limit: Size | None = Group.MEMORY.setting(
        None,
        "memory of each device that models may use, such as 8GiB",
        "all of a GPU; of the host the cgroup's limit or physical memory, less 128 MiB",
    )
    memory_reserve: Share = Group.MEMORY.setting(
        "5%", "part of the limit that no load is admitted into: a share such as 5%, or a size"
    )
    gpu_placement: Literal["triton", "most_free"] = Group.MEMORY.setting(
        "triton", "where models run that name no GPU. triton: on each; most_free: on the freest"
    )
    size_factor: Factor | None = Group.MEMORY.setting(
        None,
        "expected memory of a model divided by its size on disk, until it is measured",
        "4.1 for ONNX models in host memory, 1.25 for all others",
    )
    default_size: Size | None = Group.MEMORY.setting(
        None, "expected memory of a model of unknown size, such as 500MiB", "nothing"
    )
    sizes_file: File | None = Group.MEMORY.setting(
        None,
        "file that keeps the measured sizes of models for later runs",
        "a file in the repository, if that is not private",
    )
    oom_patterns: Patterns = Group.MEMORY.setting(
        (), "more regular expressions that mean out of memory; in the environment one a line"
    )
    load_timeout_seconds: Seconds = Group.TIME.setting(
        350.0,
        "how long a load may take, waiting and unpacking included; SageMaker itself gives up after"
        " 360",
    )
    unload_timeout_seconds: Seconds = Group.TIME.setting(
        340.0, "how long an unload may take; SageMaker itself gives up after 360"
    )
    unload_stall_seconds: Seconds = Group.TIME.setting(
        30.0,
        "an unload without progress for this long counts as stuck: the model's processes in an "
        "embedded Triton are killed",
    )
    infer_timeout_seconds: Seconds = Group.TIME.setting(300.0, "how long an inference may take")
    load_wait_seconds: Seconds = Group.TIME.setting(
        5.0, "how long a V2 call waits for a model that is being loaded"
    )
    start_timeout_seconds: Seconds = Group.TIME.setting(120.0, "how long Triton may take to start")
    drain_timeout_seconds: Seconds = Group.TIME.setting(
        18.0,
        "how long requests in flight may continue after SIGTERM; an embedded Triton then gets 4 s "
        "to end, and SageMaker sends SIGKILL after 30",
    )
    drain_min_seconds: AnySeconds = Group.TIME.setting(
        0.0,
        "how long the adapter still accepts requests after SIGTERM while probes report not ready, "
        "so that load balancers notice; part of drain_timeout_seconds",
    )
    max_connections: Count | None = Group.LIMITS.setting(
        None,
        "most connections of each of http, http_data, grpc and grpc_data; above it idle ones "
        "and those whose caller has left are closed, then new ones refused",
        "as many as the limit of open files allows; that limit less 100, divided by 2 for http, "
        "2 more with http_data, 4 more with each of grpc and grpc_data; "
        "at least 16 and at most 10000",
    )
    load_concurrency: Count | None = Group.LIMITS.setting(
        None,
        "how many models ModelMesh may load at once, and how many calls may; further loads are "
        "queued; a call's load that hangs is not counted",
        "1 for ModelMesh, 2 for calls",
    )
    max_body_bytes: Size = Group.LIMITS.setting(
        2**31 - 1,
        "largest body of an inference over HTTP; a V2 load that carries files, and a compressed "
        "body once unpacked, may have 64 MiB at most",
    )
    max_inflight_body_bytes: Size | None = Group.LIMITS.setting(
        None,
        "memory for all request bodies at once, here and on their way to Triton; above it reading "
        "from callers pauses, and after 10 s they are refused",
        "a quarter of the host's memory",
    )
    grpc_max_message_bytes: Annotated[Size, Field(lt=2**31)] | None = Group.LIMITS.setting(
        None,
        "largest gRPC message of any kind, in either direction",
        "2 GiB - 1, Triton's own limit, for a ModelInfer that goes straight to Triton and for its "
        "answer; 64 MiB for messages of streams, loads that carry files, and other answers; "
        "4 MiB for other requests",
    )
    modelmesh_load_timeout_seconds: Annotated[Seconds, Field(ge=0.1)] = Group.MODELMESH.setting(
        30.0,
        "load timeout that is reported to ModelMesh; at most load_timeout_seconds is reported",
    )
    modelmesh_default_size: Annotated[Size, Field(lt=MAX_SIZE_BYTES)] = Group.MODELMESH.setting(
        1_000_000,
        "size that is reported to ModelMesh for a model of unknown size, and the most that is "
        "predicted before a load",
    )
    modelmesh_memory_buffer: AnySize = Group.MODELMESH.setting(
        "256MiB", "part of modelmesh_memory that is not available to models"
    )
    modelmesh_memory: Size | None = Group.MODELMESH.setting(
        None,
        "memory of Triton's container; less modelmesh_memory_buffer it is the capacity that is "
        "reported to ModelMesh without a GPU",
        "what the ledger can reserve",
    )
    modelmesh_model_concurrency: Concurrency = Group.MODELMESH.setting(
        0,
        "how many requests of one model ModelMesh may send at once; 0: no limit, instances: as "
        "many as the model has instances",
    )
    modelmesh_runtime_version: str = Group.MODELMESH.setting(
        "v1", "version that is reported to ModelMesh until Triton reports its own"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Group.LOG.setting(
        "info", "lowest level that is logged"
    )
    log_format: Literal["auto", "json", "text"] = Group.LOG.setting(
        "auto", "json: one object a line; text: for people; auto: text on a terminal, else json"
    )

    @property
    def all_roots(self) -> list[Path]:
        """Return the model roots, and the folder of single_model."""
        return [*self.model_roots, *([self.single_model.parent] if self.single_model else [])]

    @property
    def has_metrics(self) -> bool:
        """Return whether /metrics and the probes have a listener other than admin."""
        return self.metrics.is_apart_from(self.admin)

    @property
    def has_http_data(self) -> bool:
        """Return whether http_data is a separate listener: http serves an address of both."""
        return self.http_data.is_apart_from(self.http)

    def token_at(self, address: Address) -> str | None:
        """Return the token that a listener requires for loads, unloads and drains, or None."""
        if self.control_token is None or address.kind != "tcp":
            return None
        return self.control_token.get_secret_value()

    def is_keyed_at(self, address: Address) -> bool:
        """Return whether a listener serves models to signed calls of the endpoint only."""
        return bool(self.endpoint_keys) and address.kind == "tcp"

    @property
    def gathered_bytes(self) -> int:
        """Return the limit of a body that is decompressed, or read whole for a model's files."""
        return min(self.max_body_bytes, _GATHERED_BYTES)


def _notes(name: str) -> dict[str, Any]:
    """Return what Group.setting has noted. TypeError if the field was not declared by it."""
    if isinstance(notes := Settings.model_fields[name].json_schema_extra, dict):
        return notes
    raise TypeError(f"setting {name} has no group: declare it by Group.NAME.setting()")


def _types(name: str) -> list[object]:
    """Return a setting's type and its metadata, and those within `TYPE | None`."""
    field = Settings.model_fields[name]
    inner = (each for kind in get_args(field.annotation) for each in get_args(kind))
    return [field.annotation, *field.metadata, *inner]


def unset_of(name: str) -> str:
    """Return what people read in place of None."""
    return str(_notes(name)["unset"])


def metavar_of(name: str) -> str:
    """Return what --help shows for the value of a flag."""
    annotation = Settings.model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return next((each for each in _types(name) if isinstance(each, Metavar)), "TEXT")


GROUPS: Mapping[str, tuple[str, ...]] = {
    group.value: tuple(name for name in Settings.model_fields if _notes(name)["group"] == group)
    for group in Group
}
# A secret has no flag, which every user of the machine can see, and no key in the file of settings,
# which is often kept where others read it.
SECRETS = frozenset(name for name in Settings.model_fields if SecretStr in _types(name))
# What a refusal does not quote: secrets, and settings in which one may be in the wrong place.
UNQUOTED = SECRETS | {"endpoint_keys", "endpoints"}
