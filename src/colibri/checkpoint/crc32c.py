"""CRC-32C (Castagnoli, RFC 3720), the checksum of each expert's record."""

from __future__ import annotations

import google_crc32c

from colibri.formats import Bytes

# Copied at a time: the library takes read-only bytes alone, and this much stays in a core's cache.
_CHUNK = 1 << 20


def crc32c(data: Bytes) -> int:
    """The checksum of bytes `[n]`; that of `123456789` is 0xE3069283."""
    checksum = 0
    for start in range(0, data.size, _CHUNK):
        checksum = google_crc32c.extend(checksum, data[start : start + _CHUNK].tobytes())
    return checksum
