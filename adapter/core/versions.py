"""Lists what changed in Triton since 2.51, and decides by the version of a Triton.

The table of docs/triton.md is written from CHANGES, and the double of Triton behaves by them.
"""

import re
from dataclasses import dataclass
from enum import Enum

Version = tuple[int, int]

# The image of NVIDIA's that the chart, compose.yaml and the Dockerfile start: the newest that
# SageMaker has and that no known fault speaks against.
DEFAULT_IMAGE = "nvcr.io/nvidia/tritonserver:26.05-py3"
IS_DEFAULT_TESTED = False  # the test suite was run on the image


class Known(Enum):
    """Says how we know of a change."""

    SEEN = "seen"  # on a newer Triton
    READ = "read"  # in the sources


@dataclass(frozen=True, slots=True)
class Change:
    """Describes a change in Triton, for people who run the adapter."""

    since: Version  # the first version of the server with the change
    what: str
    here: str  # how the adapter deals with it
    known: Known = Known.SEEN


JSON_DEPTH = Change(
    (2, 58),
    "JSON is at most 100 levels deep",
    "the adapter lets 1,000 through; Triton's 400 is passed on",
)
MAX_INPUT = Change(
    (2, 59),
    "an HTTP body has at most 64 MiB, from 2.65 on when unpacked as well",
    "an embedded Triton is started with `--http-max-input-size`; give it to an external one, else"
    " what is larger is 413 with Triton's figure",
)
CANCELS = Change(
    (2, 59),
    "cancelled calls no longer end it; 2.51 dies within 10 s of them",
    "the cancel of a ModelInfer is passed on; a stream, and before 2.59 each call, goes on to its"
    " end, for which unloads wait",
)
SLOW_POLLS = Change(
    (2, 61),
    "a process that dies in `initialize` fails its load after 5.1 to 6.8 s, not 1.0 to 2.3",
    "such a load counts as stuck after 25 s, with older ones after 5 s",
)
NAMES = Change(
    (2, 67),
    "`/` and `..` in the name of a model are refused",
    "Triton is given no such name ([decision 0001](decisions/0001-names.md))",
)
IS_READY = Change(
    (2, 67),
    "a model may have `is_ready()`: while it says False, raises or takes 5 s, it is not ready",
    "passed on; the model stays loaded",
)
DEAD_READY = Change(
    (2, 65),
    "a model whose python process has died is not ready (400 over HTTP), from 2.68 on nor is the"
    " server; its unload still never ends",
    "passed on; the text of its inferences, by which the adapter knows it, is the same",
)
CLIENT_SHM = Change(
    (2, 68),
    "shared memory of callers is off",
    "where `passthrough` opens it, an embedded Triton is started with `--allow-client-shm=true`;"
    " give it to an external one",
)
LINKS = Change(
    (2, 70),
    "a label file or library that a link leads to out of the model's folder is refused",
    "with `staging: symlink` these are"
    " [files of the folder](packages.md#how-files-come-into-the-repository)",
)
UNKNOWN_READY = Change(
    (2, 71),
    "ModelReady of an unknown model is NOT_FOUND, of a missing version INVALID_ARGUMENT, over HTTP"
    " 404; before, not ready",
    "passed on; over gRPC a model that is not loaded is still `ready: false`",
)

CHANGES = (
    JSON_DEPTH,
    MAX_INPUT,
    CANCELS,
    SLOW_POLLS,
    NAMES,
    IS_READY,
    DEAD_READY,
    CLIENT_SHM,
    Change(
        (2, 69),
        "forwarded headers called as parameters of Triton's own (`sequence_id`, `priority`,"
        " `timeout` ...) are refused; a chunked body has at most 65,536 chunks",
        "passed on",
        Known.READ,
    ),
    LINKS,
    UNKNOWN_READY,
)


def version_of(text: str) -> Version | None:
    """Return the version that a server reports (`2.73.0dev`); None for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def survives_cancels(reported: str) -> bool:
    """Return whether a Triton that reports this version survives cancels: not if it is unknown."""
    return version_of(reported) is not None and has(CANCELS, reported)


def has(change: Change, reported: str) -> bool:
    """Return whether a Triton that reports this version has the change; one of no known version is
    taken for the newest.
    """
    version = version_of(reported)
    return version is None or version >= change.since
