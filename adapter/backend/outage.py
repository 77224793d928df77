"""Logs when Triton stops answering, and when it answers again."""

import logging
import time

log = logging.getLogger("adapter.backend.triton")


class Outage:
    def __init__(self) -> None:
        self._since: float | None = None

    def update(self, *, was_live: bool, is_live: bool) -> None:
        if was_live and not is_live:
            self._since = time.monotonic()
            log.warning("triton.unreachable")
        elif is_live and self._since is not None:
            seconds = round(time.monotonic() - self._since, 3)
            self._since = None
            log.info("triton.reachable", extra={"seconds": seconds})
