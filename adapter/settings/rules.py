"""Checks settings against each other: rules that no single field can state."""

import re
from pathlib import Path

from pydantic import BaseModel, ValidationInfo, field_validator

from adapter.settings.modelmesh import refuse_capacity
from adapter.settings.values import Address, parse_endpoint_key

EXTERNAL_REPOSITORY = Path("/models/_triton_models")

# Options that the adapter itself gives to an embedded tritonserver, and what decides their values.
# tritonserver takes the last of two, and the adapter would look for it at the address of the first.
# The last option is one that the adapter does not give: with it packages bring unchecked configs.
_DECIDED_OPTIONS = {
    "--http-address": "triton_http decides",
    "--http-port": "triton_http decides",
    "--grpc-address": "triton_grpc decides",
    "--grpc-port": "triton_grpc decides",
    "--metrics-address": "triton_metrics decides",
    "--metrics-port": "triton_metrics decides",
    "--model-repository": "repository decides",
    "--model-store": "repository decides",  # an older name of --model-repository
    "--model-control-mode": "the adapter sets to explicit",
    "--strict-readiness": "the adapter sets to false",
    "--http-max-input-size": "max_body_bytes decides",
    "--grpc-max-response-pool-size": "the adapter sets",
    "--allow-client-shm": "passthrough decides",
    "--model-config-name": "leaves files to Triton that the adapter has not checked",
}
# Notebooks of SageMaker repeat values that the adapter sets anyway.
_REPEATABLE = frozenset({"--strict-readiness=false", "--model-control-mode=explicit"})


class Rules(BaseModel):
    """Base of Settings with its rules. A rule sees the fields that are declared before its own."""

    @field_validator("triton_http", "triton_grpc", "triton_metrics", check_fields=False)
    @classmethod
    def _refuse_any_port(cls, address: Address, info: ValidationInfo) -> Address:
        if address.port == 0 and info.data.get("triton") == "external":
            raise ValueError("port 0 (any free one) needs triton=embedded")
        return address

    @field_validator("triton_args", check_fields=False)
    @classmethod
    def _refuse_decided_options(
        cls, arguments: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        """Raise ValueError for an option that the adapter gives to an embedded Triton itself."""
        if info.data.get("triton") != "embedded":
            return arguments
        others = [argument for argument in arguments if argument not in _REPEATABLE]
        options = [re.split(r"[=\s]", argument)[0] for argument in others]
        decided = [option for option in options if option in _DECIDED_OPTIONS]
        if decided:
            reasons = [f"{option}, which {_DECIDED_OPTIONS[option]}" for option in decided]
            raise ValueError(f"triton_args has {'; and '.join(reasons)}")
        return arguments

    @field_validator("endpoint_keys", check_fields=False)
    @classmethod
    def _refuse_bad_keys(cls, keys: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Raise ValueError for a key that is malformed, has no secret, or occurs twice."""
        environ = (info.context or {}).get("environ", {})
        names = []
        for number, key in enumerate(keys, 1):
            try:
                names.append(parse_endpoint_key(key, environ).access_key)
            except ValueError as error:
                raise ValueError(f"key {number}: {error}") from error
        if len(set(names)) < len(names):
            raise ValueError("an access key occurs twice; each caller needs its own")
        return keys

    @field_validator("drain_min_seconds", check_fields=False)
    @classmethod
    def _refuse_long_minimum(cls, seconds: float, info: ValidationInfo) -> float:
        limit = info.data.get("drain_timeout_seconds", seconds)
        if seconds > limit:
            raise ValueError(f"longer than drain_timeout_seconds, {limit:g}")
        return seconds

    @field_validator("staging", check_fields=False)
    @classmethod
    def _refuse_upload(cls, staging: str, info: ValidationInfo) -> str:
        if staging == "upload" and info.data.get("triton") == "embedded":
            raise ValueError("upload needs triton=external: an embedded Triton shares the disk")
        return staging

    @field_validator("repository", check_fields=False)
    @classmethod
    def _choose_repository(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        is_shared = info.data.get("triton") == "external" and info.data.get("staging") != "upload"
        return EXTERNAL_REPOSITORY if path is None and is_shared else path

    @field_validator("modelmesh_capacity", check_fields=False)
    @classmethod
    def _refuse_small_capacity(cls, size: int | None, info: ValidationInfo) -> int | None:
        default = info.data.get("modelmesh_default_size")
        if size is not None and default is not None:
            refuse_capacity(size, default)
        return size

    @field_validator("memory_source", mode="before", check_fields=False)
    @classmethod
    def _check_source(cls, value: object, info: ValidationInfo) -> object:
        if value == "host" and info.data.get("triton") == "external":
            raise ValueError(
                "host needs triton=embedded: another container's processes are not visible"
            )
        return "off" if value is False else value  # YAML reads off as False
