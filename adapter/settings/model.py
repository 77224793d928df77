"""Every setting: its type, its default and what it means."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from adapter.settings.modelmesh import MAX_SIZE_BYTES, refuse_capacity
from adapter.settings.values import (
    Address,
    AnyAddress,
    AnySize,
    Arguments,
    Concurrency,
    Passthrough,
    Paths,
    Patterns,
    Seconds,
    Share,
    Size,
    TcpAddress,
)

EXTERNAL_REPOSITORY = Path("/models/_triton_models")


def _setting(default: object, meaning: str, unset: str = "none") -> Any:
    """Describe one field. `unset` says what None stands for, to people."""
    return Field(default=default, description=meaning, json_schema_extra={"unset": unset})


class Settings(BaseModel):
    """Valid as a whole. Defaults are written the way a user would write them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, coerce_numbers_to_str=True
    )

    http: AnyAddress = _setting(
        "0.0.0.0:8080",
        "listener of the SageMaker contract: HOST:PORT, unix:/path or off",
    )
    grpc: AnyAddress = _setting(
        "0.0.0.0:8085",
        "listener of ModelMesh's runtime contract and V2 over gRPC: HOST:PORT, unix:/path or off",
    )
    grpc_data: AnyAddress = _setting(
        "off",
        "a second gRPC listener, for V2 inference alone: HOST:PORT, unix:/path or off",
    )
    admin: AnyAddress = _setting(
        "0.0.0.0:8081",
        "listener of /livez, /readyz, /metrics and so on: HOST:PORT, unix:/path or off",
    )
    triton: Literal["external", "embedded"] = _setting(
        "external",
        "external: Triton is another container; embedded: start and supervise one of our own",
    )
    triton_http: TcpAddress = _setting(
        "127.0.0.1:8000",
        "where Triton's HTTP endpoint listens; port 0 = any free one, embedded only",
    )
    triton_grpc: TcpAddress = _setting(
        "127.0.0.1:8001",
        "where Triton's gRPC endpoint listens; port 0 = any free one, embedded only",
    )
    triton_metrics: TcpAddress = _setting(
        "127.0.0.1:8002",
        "where Triton's metrics endpoint listens; port 0 = any free one, embedded only",
    )
    tritonserver: Path | None = _setting(
        None,
        "embedded: the binary to start",
        "tritonserver on PATH, else the one of the wheel nvidia-pytriton",
    )
    triton_args: Arguments = _setting(
        (), "embedded: more arguments for tritonserver; in the environment split as a shell would"
    )
    staging: Literal["symlink", "hardlink", "copy", "upload"] = _setting(
        "symlink",
        "how a package's files come to Triton. symlink, hardlink, copy: in the repository; links "
        "are relative, copies and hard links are for a Triton that must not see the model roots. "
        "upload: in the load call, for an external Triton that shares no file system",
    )
    repository: Path | None = _setting(
        None,
        "model repository that Triton serves and the adapter fills; both must see it at this path, "
        "unless staging is upload",
        f"{EXTERNAL_REPOSITORY}; embedded or upload: a private folder",
    )
    model_roots: Paths = _setting(
        ("/opt/ml/models", "/models"),
        "the only folders that a caller's path may lie in, after resolving links; "
        "in the environment separated by colons",
    )
    max_unpacked_bytes: Size = _setting("64GiB", "largest content of a package that is an archive")
    single_model: Path | None = _setting(
        None, "the one package to load at start and to serve at /invocations"
    )
    memory_source: Literal["auto", "nvml", "triton", "host", "off"] = _setting(
        "auto",
        "what measures memory. nvml: the driver, the GPUs that Triton's metrics name; triton: "
        "Triton's metrics, which lag by seconds; host: the embedded server's processes; off: "
        "nothing; auto: nvml or triton where there is a GPU, else host when Triton is embedded",
    )
    memory_limit: Size | None = _setting(
        None,
        "bytes of each device that models may take, or 8GiB",
        "what the GPU has; of the host the cgroup's limit, else physical memory",
    )
    memory_reserve: Share = _setting(
        "5%", "memory of the limit kept free on purpose: a share such as 5%, or a size"
    )
    memory_recovery_seconds: Seconds = _setting(
        5.0,
        "how long an unload waits for the model's memory to be seen free, and a load for memory "
        "that is about to be",
    )
    size_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _setting(
        1.25, "memory that a model is expected to take, over its size on disk, until it is measured"
    )
    default_size: Size | None = _setting(
        None, "memory to expect of a model of which nothing is known, or 500MiB", "nothing"
    )
    sizes_file: Path | None = _setting(
        None,
        "keeps the measured sizes of models from one run to the next",
        "a file in the repository, if that is not private",
    )
    on_triton_restart: Literal["forget", "reload"] = _setting(
        "forget",
        "what becomes of the models when Triton was restarted. forget: they answer 404, and the "
        "platform loads them again; reload: the adapter does",
    )
    triton_hang_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = _setting(
        30.0,
        "an embedded Triton that has answered nothing for so long, neither HTTP nor gRPC, is ended "
        "and started again; 0: never",
    )
    oom_patterns: Patterns = _setting(
        (),
        "further regular expressions that mean out of memory in a failure text; "
        "in the environment one a line",
    )
    load_timeout_seconds: Seconds = _setting(
        350.0, "how long a load may take; SageMaker itself gives up after 360"
    )
    unload_timeout_seconds: Seconds = _setting(
        340.0, "how long an unload may take; SageMaker itself gives up after 360"
    )
    unload_stall_seconds: Seconds = _setting(
        30.0,
        "an unload that has shown no progress for so long is taken for stuck: an embedded Triton's "
        "processes of the model are killed",
    )
    infer_timeout_seconds: Seconds = _setting(300.0, "how long an inference may take")
    max_abandoned_requests: Annotated[int, Field(ge=1, lt=2**31)] = _setting(
        64,
        "requests of one model whose callers have left or had no answer in time, and that Triton "
        "still works on; above that new requests of the model are refused until some have ended",
    )
    load_wait_seconds: Seconds = _setting(
        5.0, "how long a V2 call waits for its model when that is being loaded"
    )
    control_timeout_seconds: Seconds = _setting(
        10.0, "how long Triton may take over a short control call, such as an index"
    )
    drain_timeout_seconds: Seconds = _setting(
        18.0,
        "how long work in flight may go on after SIGTERM; an embedded Triton may take 5 s more, "
        "and SageMaker sends SIGKILL after 30",
    )
    drain_min_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = _setting(
        0.0,
        "how long after SIGTERM requests are still taken, while probes say not ready, so that "
        "callers learn to go elsewhere; part of drain_timeout_seconds",
    )
    start_timeout_seconds: Seconds = _setting(120.0, "how long to wait for Triton at start")
    max_connections: Annotated[int, Field(ge=1, lt=2**31)] | None = _setting(
        None,
        "how many connections each of http, grpc and grpc_data may have; with more, idle ones are "
        "closed and then new ones refused",
        "as many as the limit of open files bears: of what is left beside 100 a half with neither "
        "grpc nor grpc_data on, a sixth with one of them, a tenth with both; "
        "at least 16 and at most 10000",
    )
    max_body_bytes: Size = _setting(
        2**31 - 1,
        "largest body of an inference over HTTP; at most 64 MiB of a load that brings files (/v2), "
        "and of what a compressed body becomes",
    )
    max_control_body_bytes: Size = _setting(
        "1MiB", "largest body of a load or another control call"
    )
    max_inflight_body_bytes: Size | None = _setting(
        None,
        "how much of requests above 256 KiB may be on its way to Triton at once; above it callers "
        "are not read from until some have gone on",
        "a quarter of the host's memory",
    )
    grpc_max_message_bytes: Annotated[Size, Field(lt=2**31)] = _setting(
        2**31 - 1, "largest message over gRPC, either way; the default is Triton's own limit"
    )
    grpc_max_unary_bytes: Annotated[Size, Field(lt=2**31)] = _setting(
        "4MiB",
        "largest request over gRPC that is no ModelInfer on its direct way to Triton, streams and "
        "loads that bring files aside",
    )
    grpc_max_stream_bytes: Annotated[Size, Field(lt=2**31)] = _setting(
        "64MiB",
        "largest message of ModelStreamInfer, either way, of a load over gRPC that brings files, "
        "and of Triton's answers to what did not go to it directly",
    )
    passthrough: Passthrough = _setting(
        (),
        "V2 calls about the whole server that are passed on to Triton: shared_memory, trace, log; "
        "in the environment separated by commas",
    )
    load_concurrency: Annotated[int, Field(ge=1, lt=2**31)] = _setting(
        1, "how many loads ModelMesh may have under way at once; further ones wait their turn"
    )
    modelmesh_load_timeout_seconds: Annotated[Seconds, Field(ge=0.1)] = _setting(
        30.0,
        "what ModelMesh is told that a load may take; no more than load_timeout_seconds is told",
    )
    modelmesh_default_size: Annotated[Size, Field(lt=MAX_SIZE_BYTES)] = _setting(
        1_000_000, "what ModelMesh is told of a model whose size nobody knows"
    )
    modelmesh_memory_buffer: AnySize = _setting(
        "256MiB", "how much of modelmesh_memory is no model's"
    )
    modelmesh_memory: Size | None = _setting(
        None,
        "memory of Triton's container; less modelmesh_memory_buffer it is the capacity that "
        "ModelMesh is told where there is no GPU",
        "what the ledger may hand out",
    )
    modelmesh_model_concurrency: Concurrency = _setting(
        0,
        "how many requests of one model ModelMesh may send at once; 0: as many as it likes, "
        "instances: as many as the model has instances",
    )
    modelmesh_runtime_version: str = _setting(
        "v1", "what ModelMesh is told while Triton does not tell its version"
    )
    examples: bool = _setting(
        False,  # noqa: FBT003 - the default of the setting
        "serve: add the example models to model_roots and print curl lines for them",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "the least grave events to log"
    )
    log_format: Literal["auto", "json", "text"] = _setting(
        "auto", "json: one object a line; text: for people; auto: text on a terminal, else json"
    )

    @field_validator("triton_http", "triton_grpc", "triton_metrics")
    @classmethod
    def _known_port(cls, address: Address, info: ValidationInfo) -> Address:
        if address.port == 0 and info.data.get("triton") == "external":
            raise ValueError("port 0 (any free one) needs triton=embedded")
        return address

    @field_validator("drain_min_seconds")
    @classmethod
    def _time_left_to_drain(cls, seconds: float, info: ValidationInfo) -> float:
        limit = info.data.get("drain_timeout_seconds", seconds)
        if seconds > limit:
            raise ValueError(f"longer than drain_timeout_seconds, {limit:g}")
        return seconds

    @field_validator("staging")
    @classmethod
    def _upload_to_another(cls, staging: str, info: ValidationInfo) -> str:
        if staging == "upload" and info.data.get("triton") == "embedded":
            raise ValueError("upload needs triton=external: the embedded one shares the disk")
        return staging

    @field_validator("repository")
    @classmethod
    def _shared_repository(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        is_shared = info.data.get("triton") == "external" and info.data.get("staging") != "upload"
        return EXTERNAL_REPOSITORY if path is None and is_shared else path

    @field_validator("modelmesh_memory")
    @classmethod
    def _enough_for_the_mesh(cls, size: int | None, info: ValidationInfo) -> int | None:
        needed = ("modelmesh_memory_buffer", "modelmesh_default_size")
        if size is not None and all(name in info.data for name in needed):
            buffer, default = (info.data[name] for name in needed)
            refuse_capacity(size - buffer, default)
        return size

    @field_validator("memory_source", mode="before")
    @classmethod
    def _check_source(cls, value: object, info: ValidationInfo) -> object:
        if value == "host" and info.data.get("triton") == "external":
            raise ValueError("host needs triton=embedded: another container's processes are unseen")
        return "off" if value is False else value  # YAML reads off as False
