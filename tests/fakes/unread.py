"""Answers of streams that their callers have not taken, of which so many are kept."""

from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.unread import Unread


def unread(limit: int = 2**28) -> Unread:
    return Unread(ByteBudget(2**30), limit)
