"""Holds the contents of a container against its checksums, each file read once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from colibri.checkpoint.container import Container
from colibri.checkpoint.container_manifest import layer_file
from colibri.checkpoint.crc32c import crc32c
from colibri.errors import CheckpointError
from colibri.formats import as_bytes

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_PIECE = 4 << 20
