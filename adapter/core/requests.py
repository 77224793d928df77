"""Says what callers ask of a load or an update."""

from enum import Enum, auto


class Replaces(Enum):
    """Says which model that is loaded already is replaced by a package."""

    ALWAYS = auto()
    OTHER_SOURCE = auto()  # a model that was loaded from elsewhere
    # a model whose files have changed; it is loaded again from where it was loaded
    CHANGED_FILES = auto()


class RoomMaker(Enum):
    """Says who makes room in memory for a load."""

    ADAPTER = auto()  # the load waits, evicts or is refused
    MESH = auto()  # ModelMesh has evicted others by its own books, or is about to
