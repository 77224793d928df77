"""The content types that a model with one input may opt into, besides V2's own."""

from collections.abc import Sequence

from adapter.codecs.base import Codec
from adapter.codecs.csv import Csv
from adapter.codecs.npy import Npy
from adapter.codecs.raw import Octets, Raw, Text
from adapter.core.tensors import ContentTypes, Tensor

# All there are; of answers the preferred ones come first.
CODECS: list[Codec] = [Raw(), Npy(), Octets(), Csv(), Text()]

# The name of the list in a config.pbtxt.
CONTENT_TYPES_PARAMETER = "adapter_content_types"


def codec_of(media_type: str) -> Codec | None:
    """Return the codec of a media type; None if there is none."""
    for codec in CODECS:
        if codec.accepts(media_type):
            return codec
    return None


def _list_known() -> str:
    listed = [(codec, name) for codec in CODECS for name in codec.listed]
    return ", ".join(
        f"{name};{option}" if option else name
        for codec, name in listed
        for option in ("", *codec.options)
    )


def content_types(
    text: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, is_batched: bool
) -> ContentTypes:
    """Read the list that a model has; `inputs` are all of its inputs.

    Raises ValueError with the reason.
    """
    found: dict[str, Codec] = {}
    options = set()
    for part in (each.strip().lower() for each in text.split(",")):
        name, _, option = (each.strip() for each in part.partition(";"))
        codec = codec_of(name)
        if codec is None or (option and option not in codec.options):
            raise ValueError(f"unknown content type {part[:100]!r}; supported are {_list_known()}")
        found[name] = codec
        options.add(option)
    if len(inputs) != 1:
        count = len(inputs) or "none"
        raise ValueError(f"a model with one input is needed; the config names {count}")
    types = ContentTypes(
        tuple(found), frozenset(options - {""}), is_batched, inputs[0], tuple(outputs)
    )
    for name, codec in found.items():
        codec.check(name, types)
    return types
