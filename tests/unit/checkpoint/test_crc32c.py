"""The checksum is the published one."""

import numpy as np

from colibri.checkpoint.crc32c import crc32c


def test_crc32c_is_castagnoli() -> None:
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert crc32c(np.zeros(32, np.uint8)) == 0x8A9136AA  # RFC 3720, B.4
    long = np.arange(5 << 20, dtype=np.uint32).view(np.uint8)[: (3 << 20) + 5]
    reference = crc32c(long)
    long = long.copy()
    long[-1] ^= 1
    assert crc32c(long) != reference
