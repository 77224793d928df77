"""Compares what a store sends with its ETags, where those are MD5 sums.

S3 has such ETags, but not for objects that KMS encrypts, whose ETags look alike. Where a second
download brings the same bytes as the first one, the ETag is no sum; from then on those of this
store are not compared.
"""

import re
from collections.abc import Mapping

from adapter.settings.locations import StoreKind, StoreLocation
from adapter.store.ports import StoredFile, Unfinished, describe_failure

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_MAX_REMEMBERED = 10_000


class Checksums:
    """Knows the MD5 sums of one store's objects."""

    def __init__(self, location: StoreLocation) -> None:
        self._location = location
        self._has_sums = location.kind is StoreKind.S3
        self._seen: dict[str, str] = {}  # sums of what came otherwise, by key

    def expected(self, file: StoredFile) -> str | None:
        """Return the MD5 sum that the object should have; None if it is not known."""
        match = _MD5.fullmatch(file.etag) if self._has_sums else None
        return match[1] if match else None

    def check(self, wrong: Mapping[str, str]) -> None:
        """Accept or refuse objects by the sums that they have in place of the expected ones.

        Raises Unfinished, unless the same bytes came before.
        """
        if not wrong:
            return
        if all(self._seen.pop(key, None) == md5 for key, md5 in wrong.items()):
            self._has_sums = False
            return
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.clear()
        self._seen.update(wrong)
        reason = "the store sent other bytes than its ETag says"
        raise Unfinished(describe_failure(self._location, min(wrong), reason))
