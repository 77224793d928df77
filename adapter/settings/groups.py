"""How --help has the settings: in groups, and with what each of them takes."""

from collections.abc import Mapping
from typing import Literal, get_args, get_origin

from adapter.settings.model import Settings

GROUPS: Mapping[str, tuple[str, ...]] = {
    "listeners": (
        "listen_host",
        "http",
        "http_data",
        "grpc",
        "grpc_data",
        "admin",
        "metrics",
        "allowed_hosts",
        "control_token",
        "control_token_file",
    ),
    "Triton": (
        "triton",
        "triton_http",
        "triton_grpc",
        "triton_metrics",
        "tritonserver",
        "triton_args",
        "on_triton_restart",
        "triton_hang_seconds",
        "passthrough",
        "inline_files",
    ),
    "models": (
        "model_roots",
        "repository",
        "staging",
        "max_unpacked_bytes",
        "single_model",
        "inference_type",
        "load_at_start",
        "ready_when",
        "warm_up",
    ),
    "endpoint": (
        "model_store",
        "endpoints",
        "cache_dir",
        "cache_limit",
        "fetch_concurrency",
        "store_timeout_seconds",
        "endpoint_keys",
        "on_demand",
        "pin",
        "preload",
        "idle_unload_seconds",
        "model_wait_seconds",
        "revalidate_seconds",
    ),
    "memory": (
        "memory_source",
        "memory_limit",
        "memory_reserve",
        "memory_recovery_seconds",
        "size_factor",
        "default_size",
        "sizes_file",
        "oom_patterns",
    ),
    "time limits": (
        "load_timeout_seconds",
        "unload_timeout_seconds",
        "unload_stall_seconds",
        "infer_timeout_seconds",
        "load_wait_seconds",
        "start_timeout_seconds",
        "drain_timeout_seconds",
        "drain_min_seconds",
    ),
    "other limits": (
        "max_connections",
        "max_abandoned_requests",
        "load_concurrency",
        "max_body_bytes",
        "max_inflight_body_bytes",
        "grpc_max_message_bytes",
    ),
    "Vertex AI": ("vertex_model",),
    "ModelMesh": (
        "modelmesh_load_timeout_seconds",
        "modelmesh_default_size",
        "modelmesh_memory_buffer",
        "modelmesh_memory",
        "modelmesh_model_concurrency",
        "modelmesh_runtime_version",
    ),
    "log": ("log_level", "log_format"),
}

# Settings that are secret: no flag, which all users of a machine can see, and no line of a file of
# settings, which is often kept where many read.
SECRETS = frozenset({"control_token"})

_METAVARS = {
    **dict.fromkeys(("http", "http_data", "grpc", "grpc_data"), "HOST:PORT"),
    **dict.fromkeys(("admin", "metrics"), "HOST:PORT"),
    **dict.fromkeys(("triton_http", "triton_grpc", "triton_metrics"), "HOST:PORT"),
    **dict.fromkeys(("listen_host", "allowed_hosts"), "HOST"),
    **dict.fromkeys(("tritonserver", "sizes_file", "control_token_file"), "FILE"),
    "control_token": "TOKEN",
    **dict.fromkeys(("repository", "single_model", "model_roots", "cache_dir"), "FOLDER"),
    "model_store": "URL|FOLDER",
    "endpoints": "NAME=URL",
    "cache_limit": "SIZE",
    "fetch_concurrency": "N",
    "load_at_start": "[NAME=]PATH",
    **dict.fromkeys(("memory_limit", "default_size", "modelmesh_default_size"), "SIZE"),
    **dict.fromkeys(("modelmesh_memory", "modelmesh_memory_buffer"), "SIZE"),
    **dict.fromkeys(("max_connections", "max_abandoned_requests", "load_concurrency"), "N"),
    "endpoint_keys": "KEY",
    "pin": "PATTERN",
    "vertex_model": "NAME",
    "preload": "KEY",
    "memory_reserve": "PERCENT|SIZE",
    "modelmesh_model_concurrency": "N|instances",
    "modelmesh_runtime_version": "TEXT",
    "oom_patterns": "REGEX",
    "passthrough": "shared_memory|trace|log",
    "size_factor": "NUMBER",
    "triton_args": "ARGUMENT",
}


def metavar_of(name: str) -> str:
    """What stands for the value behind the flag."""
    annotation = Settings.model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if name.endswith("_seconds"):
        return "SECONDS"
    return "SIZE" if name.endswith("_bytes") else _METAVARS[name]
