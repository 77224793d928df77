"""Every setting: its type, its default and what it means."""

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
    ModelName,
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
    """The groups of settings, in the order of --help."""

    LISTENERS = "listeners"
    TRITON = "Triton"
    MODELS = "models"
    ENDPOINT = "endpoint"
    MEMORY = "memory"
    TIME = "time limits"
    LIMITS = "other limits"
    VERTEX = "Vertex AI"
    MODELMESH = "ModelMesh"
    LOG = "log"

    def setting(self, default: object, meaning: str, unset: str = "none") -> Any:
        """Declare a setting of this group. `unset` says what None stands for, to people."""
        extra: dict[str, Any] = {"group": self.value, "unset": unset}
        return Field(default=default, description=meaning, json_schema_extra=extra)


class Settings(Rules):
    """Every setting, valid as a whole. Defaults are written the way a user would write them. What
    --help shows for a value is part of its type (`Metavar`), and so is whether it is a secret.
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
        "where http, grpc and admin listen when their own settings do not say: 127.0.0.1 is for "
        "this machine alone, :: is for all who reach it, over IPv6 and IPv4 (over IPv4 alone where "
        "there is no IPv6), 0.0.0.0 for all over IPv4",
    )
    http: AnyAddress = Group.LISTENERS.setting(
        "127.0.0.1:8080",
        "listener of the SageMaker contract: HOST:PORT, unix:/path or off",
    )
    http_data: AnyAddress = Group.LISTENERS.setting(
        "off",
        "a second HTTP listener, for inference alone (SageMaker's invoke, V2): HOST:PORT, "
        "unix:/path or off",
    )
    grpc: AnyAddress = Group.LISTENERS.setting(
        "127.0.0.1:8085",
        "listener of ModelMesh's runtime contract and V2 over gRPC: HOST:PORT, unix:/path or off",
    )
    grpc_data: AnyAddress = Group.LISTENERS.setting(
        "off",
        "a second gRPC listener, for V2 inference alone: HOST:PORT, unix:/path or off",
    )
    admin: AnyAddress = Group.LISTENERS.setting(
        "127.0.0.1:8081",
        "listener of /livez, /readyz, /metrics and so on: HOST:PORT, unix:/path or off",
    )
    metrics: AnyAddress = Group.LISTENERS.setting(
        "off",
        "a listener for /metrics and the probes /livez, /readyz and /startup alone, which admin "
        "then has no more: HOST:PORT, unix:/path or off",
    )
    allowed_hosts: Hosts = Group.LISTENERS.setting(
        (),
        "names that http and admin are known by on loopback besides localhost and its addresses, "
        "as where a proxy on the same machine keeps Host; pages of these hosts may send requests "
        "from a browser; in the environment separated by commas",
    )
    control_token: Token | None = Group.LISTENERS.setting(
        None,
        "what callers over TCP must send as `Authorization: Bearer TOKEN` to load, unload, drain, "
        "and call mmesh.ModelRuntime; unix sockets want none. It is given by the environment or in "
        "control_token_file",
        "no token is wanted",
    )
    control_token_file: File | None = Group.LISTENERS.setting(
        None, "file that holds control_token, read at the start", "no token is wanted"
    )
    triton: Literal["external", "embedded"] = Group.TRITON.setting(
        "external",
        "external: Triton is another container; embedded: start and supervise one of our own",
    )
    triton_http: TcpAddress = Group.TRITON.setting(
        "127.0.0.1:8000",
        "where Triton's HTTP endpoint listens; port 0 = any free one, embedded only",
    )
    triton_grpc: TcpAddress = Group.TRITON.setting(
        "127.0.0.1:8001",
        "where Triton's gRPC endpoint listens; port 0 = any free one, embedded only",
    )
    triton_metrics: TcpAddress = Group.TRITON.setting(
        "127.0.0.1:8002",
        "where Triton's metrics endpoint listens; port 0 = any free one, embedded only",
    )
    tritonserver: File | None = Group.TRITON.setting(
        None,
        "embedded: the binary to start",
        "tritonserver on PATH, else the one of the wheel nvidia-pytriton",
    )
    triton_args: Arguments = Group.TRITON.setting(
        (), "embedded: more arguments for tritonserver; in the environment split as a shell would"
    )
    on_triton_restart: Literal["auto", "forget", "reload"] = Group.TRITON.setting(
        "auto",
        "what becomes of the models when Triton was restarted. forget: they answer 404, and the "
        "platform loads them again; reload: the adapter does; auto: forget on SageMaker's "
        "multi-model endpoints and under ModelMesh (a variable of theirs is set, or ModelMesh has "
        "called runtimeStatus), else reload",
    )
    triton_hang_seconds: AnySeconds = Group.TRITON.setting(
        30.0,
        "an embedded Triton that has answered nothing for so long, neither HTTP nor gRPC, is ended "
        "and started again; 0: never",
    )
    passthrough: Passthrough = Group.TRITON.setting(
        (),
        "V2 calls about the whole server that are passed on to Triton: shared_memory, trace, log; "
        "in the environment separated by commas",
    )
    inline_files: OnOff = Group.TRITON.setting(
        "on",
        "whether a load over V2 may bring the model's files, and so code (file: parameters); off: "
        "such loads are refused",
    )
    model_roots: Paths = Group.MODELS.setting(
        ("/opt/ml/models", "/models"),
        "the only folders that a caller's path may lie in, after resolving links; "
        "in the environment separated by colons",
    )
    staging: Literal["symlink", "hardlink", "copy", "upload"] = Group.MODELS.setting(
        "symlink",
        "how a package's files come to Triton. symlink, hardlink, copy: in the repository; links "
        "are relative, copies and hard links are for a Triton that must not see the model roots. "
        "upload: in the load call, for an external Triton that shares no file system",
    )
    repository: Folder | None = Group.MODELS.setting(
        None,
        "model repository that Triton serves and the adapter fills; both must see it at this path, "
        "unless staging is upload",
        f"{EXTERNAL_REPOSITORY}; embedded or upload: a private folder",
    )
    max_unpacked_bytes: Size = Group.MODELS.setting(
        "64GiB", "largest content of a package that is an archive"
    )
    single_model: Folder | None = Group.MODELS.setting(
        None, "the one package to load at start and to serve at /invocations"
    )
    inference_type: Literal["infer", "generate", "generate_stream"] = Group.MODELS.setting(
        "infer",
        "what SageMaker's invocations are to Triton. infer: inferences; generate: calls of its "
        "generate extension, one answer to each; generate_stream: the same, answers as events",
    )
    load_at_start: Models = Group.MODELS.setting(
        (),
        "packages to load at the start, and again when Triton was restarted: PATH or NAME=PATH, "
        "below the first of model_roots unless it begins with a slash, or FOLDER/* for each in "
        "that folder; in the environment separated by colons",
    )
    ready_when: Literal["started", "models"] = Group.MODELS.setting(
        "models",
        "when probes say ready. models: once all of load_at_start are loaded, failed loads being "
        "tried again; started: once loads can be taken",
    )
    warm_up: Literal["none", "zeros"] = Group.MODELS.setting(
        "none",
        "what a model computes before its load is answered. none: the model_warmup of its "
        "config.pbtxt, which Triton runs by itself; zeros: where it has none, one inference of "
        "zeros and empty strings",
    )
    model_store: Store | None = Group.ENDPOINT.setting(
        None,
        "where models lie that calls name: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://CONTAINER/PREFIX, https://HOST/PATH or a folder; buckets and web servers need the "
        "extra store",
        "no endpoint",
    )
    endpoints: Endpoints = Group.ENDPOINT.setting(
        (),
        "further stores, each as an endpoint of its own name: NAME=URL; in the file also "
        "`NAME: {models: URL}`; in the environment one a line",
    )
    cache_dir: Folder | None = Group.ENDPOINT.setting(
        None,
        "folder that keeps what was fetched from stores, unpacked, also for later runs; for one "
        "adapter alone",
        "triton-adapter in $XDG_CACHE_HOME or ~/.cache",
    )
    cache_limit: Size | None = Group.ENDPOINT.setting(
        None,
        "how much cache_dir may take; the least recently used leave, what is loaded never does",
        "nine tenths of what is free, beside 1GiB",
    )
    fetch_concurrency: Count = Group.ENDPOINT.setting(
        4, "how many models may be fetched from stores at once; further ones wait their turn"
    )
    store_timeout_seconds: Seconds = Group.ENDPOINT.setting(
        20.0,
        "how long a store may say nothing, and requests to it are tried again; a large model may "
        "take longer as long as bytes arrive",
    )
    endpoint_keys: KeyLines = Group.ENDPOINT.setting(
        (),
        "who may call the endpoint: `ACCESS_KEY env:VARIABLE TEAM/*`, a key, where its secret is "
        "(env:VARIABLE or file:PATH) and patterns of TargetModel with * and ?; calls must be "
        "signed then, and others over TCP that infer or load want control_token; in the "
        "environment one a line",
    )
    on_demand: bool = Group.ENDPOINT.setting(
        False,  # noqa: FBT003 - the default of the setting
        "V2 calls, REST and gRPC, load their models from the stores as the endpoint's calls do",
    )
    pin: NamePatterns = Group.ENDPOINT.setting(
        (),
        "models that calls have loaded and that are never evicted or unloaded when idle: patterns "
        "of their names, such as team-a/*; in the environment one a line",
    )
    preload: ModelKeys = Group.ENDPOINT.setting(
        (),
        "models of the stores to load before the adapter is ready: KEY, or ENDPOINT/KEY; one that "
        "is missing or invalid is only told at /readyz; in the environment one a line",
    )
    idle_unload_seconds: AnySeconds = Group.ENDPOINT.setting(
        0.0,
        "after how long without a call a model that calls have loaded is unloaded; 0: never, it "
        "stays until others need the room",
    )
    model_wait_seconds: Seconds = Group.ENDPOINT.setting(
        55.0,
        "how long a call waits for its model to be fetched and loaded, which goes on after that; "
        "boto3 itself gives up after 60",
    )
    revalidate_seconds: AnySeconds = Group.ENDPOINT.setting(
        0.0,
        "how often the store is asked whether it has another version of a model that calls have "
        "loaded, which then takes its place; 0: a new version is noticed at the next load",
    )
    memory_source: Literal["auto", "nvml", "triton", "host", "off"] = Group.MEMORY.setting(
        "auto",
        "what measures memory. nvml: the driver, the GPUs that Triton's metrics name; triton: "
        "Triton's metrics, which lag by seconds; host: the embedded server's processes; off: "
        "nothing; auto: nvml or triton where there is a GPU, else host when Triton is embedded",
    )
    memory_limit: Size | None = Group.MEMORY.setting(
        None,
        "bytes of each device that models may take, or 8GiB",
        "what the GPU has; of the host the cgroup's limit or physical memory, less 128 MiB",
    )
    memory_reserve: Share = Group.MEMORY.setting(
        "5%", "memory of the limit kept free on purpose: a share such as 5%, or a size"
    )
    memory_recovery_seconds: Seconds = Group.MEMORY.setting(
        5.0,
        "how long an unload waits for the model's memory to be seen free, and a load for memory "
        "that is about to be",
    )
    size_factor: Factor = Group.MEMORY.setting(
        1.25, "memory that a model is expected to take, over its size on disk, until it is measured"
    )
    default_size: Size | None = Group.MEMORY.setting(
        None, "memory to expect of a model of which nothing is known, or 500MiB", "nothing"
    )
    sizes_file: File | None = Group.MEMORY.setting(
        None,
        "keeps the measured sizes of models from one run to the next",
        "a file in the repository, if that is not private",
    )
    oom_patterns: Patterns = Group.MEMORY.setting(
        (),
        "further regular expressions that mean out of memory in a failure text; "
        "in the environment one a line",
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
        "an unload that has shown no progress for so long is taken for stuck: an embedded Triton's "
        "processes of the model are killed",
    )
    infer_timeout_seconds: Seconds = Group.TIME.setting(300.0, "how long an inference may take")
    load_wait_seconds: Seconds = Group.TIME.setting(
        5.0, "how long a V2 call waits for its model when that is being loaded"
    )
    start_timeout_seconds: Seconds = Group.TIME.setting(
        120.0, "how long to wait for Triton at start"
    )
    drain_timeout_seconds: Seconds = Group.TIME.setting(
        18.0,
        "how long work in flight may go on after SIGTERM; an embedded Triton may take 5 s more, "
        "and SageMaker sends SIGKILL after 30",
    )
    drain_min_seconds: AnySeconds = Group.TIME.setting(
        0.0,
        "how long after SIGTERM requests are still taken, while probes say not ready, so that "
        "callers learn to go elsewhere; part of drain_timeout_seconds",
    )
    max_connections: Count | None = Group.LIMITS.setting(
        None,
        "how many connections each of http, http_data, grpc and grpc_data may have; with more, "
        "idle ones are closed and then new ones refused",
        "as many as the limit of open files bears: what is left beside 100, divided by 2 for http, "
        "2 more with http_data and 4 more with each of grpc and grpc_data; "
        "at least 16 and at most 10000",
    )
    max_abandoned_requests: Count = Group.LIMITS.setting(
        64,
        "requests of one model whose callers have left or had no answer in time, and that Triton "
        "still works on; above that new requests of the model are refused until some have ended",
    )
    load_concurrency: Count | None = Group.LIMITS.setting(
        None,
        "how many loads ModelMesh may have under way at once, and how many calls of the endpoint "
        "and of V2; further ones wait their turn; of calls' loads one that hangs is not counted",
        "1 of ModelMesh, 2 of calls",
    )
    max_body_bytes: Size = Group.LIMITS.setting(
        2**31 - 1,
        "largest body of an inference over HTTP; at most 64 MiB of a load that brings files (/v2), "
        "and of what a compressed body becomes",
    )
    max_inflight_body_bytes: Size | None = Group.LIMITS.setting(
        None,
        "how much callers' bodies may take at once, here and on their way to Triton; above it "
        "callers are not read from, and after 10 s refused",
        "a quarter of the host's memory",
    )
    grpc_max_message_bytes: Annotated[Size, Field(lt=2**31)] | None = Group.LIMITS.setting(
        None,
        "largest message over gRPC, either way, whatever it is",
        "2 GiB - 1 of a ModelInfer that goes straight to Triton and of its answer, Triton's own "
        "limit; 64 MiB of a stream's messages, of loads that bring files, and of other answers; "
        "4 MiB of other requests",
    )
    vertex_model: ModelName | None = Group.VERTEX.setting(
        None,
        "the model of predictions that name none in X-Vertex-Ai-Triton-Redirect",
        "that of single_model",
    )
    modelmesh_load_timeout_seconds: Annotated[Seconds, Field(ge=0.1)] = Group.MODELMESH.setting(
        30.0,
        "what ModelMesh is told that a load may take; no more than load_timeout_seconds is told",
    )
    modelmesh_default_size: Annotated[Size, Field(lt=MAX_SIZE_BYTES)] = Group.MODELMESH.setting(
        1_000_000, "what ModelMesh is told of a model whose size nobody knows"
    )
    modelmesh_memory_buffer: AnySize = Group.MODELMESH.setting(
        "256MiB", "how much of modelmesh_memory is no model's"
    )
    modelmesh_memory: Size | None = Group.MODELMESH.setting(
        None,
        "memory of Triton's container; less modelmesh_memory_buffer it is the capacity that "
        "ModelMesh is told where there is no GPU",
        "what the ledger may hand out",
    )
    modelmesh_model_concurrency: Concurrency = Group.MODELMESH.setting(
        0,
        "how many requests of one model ModelMesh may send at once; 0: as many as it likes, "
        "instances: as many as the model has instances",
    )
    modelmesh_runtime_version: str = Group.MODELMESH.setting(
        "v1", "what ModelMesh is told while Triton does not tell its version"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Group.LOG.setting(
        "info", "the lowest level that is logged"
    )
    log_format: Literal["auto", "json", "text"] = Group.LOG.setting(
        "auto", "json: one object a line; text: for people; auto: text on a terminal, else json"
    )

    @property
    def all_roots(self) -> list[Path]:
        """The model roots, and the folder of single_model."""
        return [*self.model_roots, *([self.single_model.parent] if self.single_model else [])]

    @property
    def has_metrics(self) -> bool:
        """Whether /metrics and the probes have a listener of their own, and admin has none."""
        return self.metrics.is_apart_from(self.admin)

    @property
    def has_http_data(self) -> bool:
        """Whether it is a listener of its own: `http` serves an address that is given to both."""
        return self.http_data.is_apart_from(self.http)

    def token_at(self, address: Address) -> str | None:
        """Return what loads, unloads and drains must bring at a listener; None for nothing."""
        if self.control_token is None or address.kind != "tcp":
            return None
        return self.control_token.get_secret_value()

    def is_keyed_at(self, address: Address) -> bool:
        """Whether models are for signed calls of the endpoint alone at a listener."""
        return bool(self.endpoint_keys) and address.kind == "tcp"

    @property
    def gathered_bytes(self) -> int:
        """The limit of a body that is unpacked, or read whole as it holds a model's files."""
        return min(self.max_body_bytes, _GATHERED_BYTES)


def _notes(name: str) -> Mapping[str, str]:
    return Settings.model_fields[name].json_schema_extra  # type: ignore[return-value]


def _types(name: str) -> list[object]:
    """Return a setting's type and its metadata, and those within `TYPE | None`."""
    field = Settings.model_fields[name]
    inner = (each for kind in get_args(field.annotation) for each in get_args(kind))
    return [field.annotation, *field.metadata, *inner]


def unset_of(name: str) -> str:
    """Return what None stands for, to people."""
    return _notes(name)["unset"]


def metavar_of(name: str) -> str:
    """Return what stands for the value behind the flag."""
    annotation = Settings.model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return next((each for each in _types(name) if isinstance(each, Metavar)), "TEXT")


GROUPS: Mapping[str, tuple[str, ...]] = {
    group.value: tuple(name for name in Settings.model_fields if _notes(name)["group"] == group)
    for group in Group
}
# They have no flag, which all users of a machine can see, and no line in a file of settings, which
# is often kept where many read.
SECRETS = frozenset(name for name in Settings.model_fields if SecretStr in _types(name))
