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
    Single,
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
        hide_input_in_errors=True,  # an input may be a token
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
        "and call mmesh.ModelRuntime; unix sockets need none. Set only in the environment: the "
        "token, or file:PATH of the file that holds it, read at start",
        "no token is required",
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
    single_model: Single | None = Group.MODELS.setting(
        None,
        "the one package that is loaded at start and served at /invocations; models in the folders "
        "beside it to which its config.pbtxt or its Python code refers are loaded with it. Names "
        "of further ones follow the folder, separated by colons",
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
    endpoint_keys: KeyLines = Group.ENDPOINT.setting(
        (),
        "who may call the endpoint: `ACCESS_KEY env:VARIABLE TEAM/*`, a key, where its secret is "
        "(env:VARIABLE or file:PATH) and patterns of TargetModel with * and ?; calls must then be "
        "signed, and other calls over TCP that infer or load need control_token; in the "
        "environment one a line",
    )
    on_demand: bool = Group.ENDPOINT.setting(
        False,  # noqa: FBT003 - the default of the setting
        "calls of V2 and of OpenAI's paths load their models from the stores, as the endpoint's "
        "calls do",
    )
    pin: NamePatterns = Group.ENDPOINT.setting(
        (),
        "models that are never evicted or unloaded when idle once a call has loaded them: patterns "
        "of their names, such as team-a/*; in the environment one a line",
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
    oom_patterns: Patterns = Group.MEMORY.setting(
        (), "more regular expressions that mean out of memory; in the environment one a line"
    )
    load_timeout_seconds: Annotated[Seconds, Field(ge=0.1)] = Group.TIME.setting(
        350.0,
        "how long a load may take, waiting and unpacking included; ModelMesh gets it, too; "
        "SageMaker itself gives up after 360",
    )
    infer_timeout_seconds: Seconds = Group.TIME.setting(300.0, "how long an inference may take")
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
    load_concurrency: Count | None = Group.LIMITS.setting(
        None,
        "how many models ModelMesh may load at once, and how many calls may; further loads are "
        "queued; a call's load that hangs is not counted",
        "1 for ModelMesh, 2 for calls",
    )
    max_body_bytes: Size = Group.LIMITS.setting(
        2**31 - 1,
        "largest body over HTTP, and message over gRPC, of an inference. V2 loads with files, "
        "messages of streams, and compressed bodies once unpacked may have 64 MiB at most, other "
        "requests over gRPC 4 MiB",
    )
    max_inflight_body_bytes: Size | None = Group.LIMITS.setting(
        None,
        "memory for all request bodies at once, here and on their way to Triton; above it reading "
        "from callers pauses, and after 10 s they are refused",
        "a quarter of the host's memory",
    )
    modelmesh_default_size: Annotated[Size, Field(lt=MAX_SIZE_BYTES)] = Group.MODELMESH.setting(
        1_000_000,
        "size that is reported to ModelMesh for a model of unknown size, and the most that is "
        "predicted before a load",
    )
    modelmesh_capacity: Size | None = Group.MODELMESH.setting(
        None,
        "memory for models that is reported to ModelMesh without a GPU, at most: that of Triton's "
        "container less what Triton itself takes",
        "what the ledger can reserve",
    )
    modelmesh_model_concurrency: Concurrency = Group.MODELMESH.setting(
        0,
        "how many requests of one model ModelMesh may send at once; 0: no limit, instances: as "
        "many as the model has instances",
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
        beside = [self.single_model.folder.parent] if self.single_model else []
        return [*self.model_roots, *beside]

    @property
    def has_metrics(self) -> bool:
        """Return whether /metrics and the probes have a listener other than admin."""
        return self.metrics.is_apart_from(self.admin)

    @property
    def has_http_data(self) -> bool:
        """Return whether http_data is a separate listener: http serves an address of both."""
        return self.http_data.is_apart_from(self.http)

    @property
    def has_grpc_data(self) -> bool:
        """Return whether grpc_data is a separate listener: grpc serves an address of both."""
        return self.grpc_data.is_apart_from(self.grpc)

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
