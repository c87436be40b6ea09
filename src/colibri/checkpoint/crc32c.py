"""CRC-32C (Castagnoli, RFC 3720), the checksum of each expert's record."""

from __future__ import annotations

import google_crc32c

from colibri.formats import Bytes

# Copied at a time: the library takes read-only bytes alone, and this much stays in a core's cache.
_CHUNK = 1 << 20


def crc32c(data: Bytes, checksum: int = 0) -> int:
    """The checksum of bytes `[n]`, behind others of `checksum`; of `123456789` it is 0xE3069283."""
    for start in range(0, data.size, _CHUNK):
        checksum = google_crc32c.extend(checksum, data[start : start + _CHUNK].tobytes())
    return checksum
