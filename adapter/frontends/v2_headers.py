"""Headers of a V2 call on their way to Triton."""

from collections.abc import Mapping

from adapter.frontends.edge import passed_on


def call_headers(headers: Mapping[str, str], *, is_rewritten: bool) -> dict[str, str]:
    """`is_rewritten`: names in the answer will have to be put back, so it must not be packed."""
    return {
        name: value.lower() if name.lower() == "content-encoding" else value  # Triton knows no GZIP
        for name, value in passed_on(headers).items()
        if not is_rewritten or name.lower() != "accept-encoding"
    }
