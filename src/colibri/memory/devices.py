"""How a drive is best read: found once by a short measurement, remembered in `devices.json`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from colibri.memory.receipt import write_atomically

NAME = "devices.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a drive.

    Attributes:
        direct: whether reads bypass the page cache.
        threads: reads in flight.
        block: bytes of one read; larger pieces are split.
        keep_cache: whether buffered reads leave their pages in the page cache.
        bytes_per_s: what that gave, 0 where it was not measured.
    """

    direct: bool = True
    threads: int = 4
    block: int = 1 << 20
    keep_cache: bool = False
    bytes_per_s: int = 0


def device_key(path: Path, piece_nbytes: int, root: Path = Path("/")) -> str:
    """Names the drive that a file lies on, its file system, and the size of reads.

    Raises:
        OSError: there is no such file.
    """
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind, source = _mount(root, number)
    model = _model(root, number) or source
    return f"{number} {model} {kind} {1 << max(0, piece_nbytes - 1).bit_length()}".replace(
        "  ", " "
    )


def mount_of(path: Path, root: Path = Path("/")) -> tuple[str, str]:
    """File system and source of the mount that a file lies on, `?` and nothing if unknown.

    Raises:
        OSError: there is no such file.
    """
    device = path.stat().st_dev
    return _mount(root, f"{os.major(device)}:{os.minor(device)}")


def remembered(cache: Path | None, key: str) -> Reading | None:
    """What was measured earlier; None where nothing was, or what is there makes no sense."""
    if cache is None:
        return None
    about = _read(cache).get(key)
    if not isinstance(about, Mapping):
        return None
    values = {field.name: about.get(field.name) for field in fields(Reading)}
    if any(type(values[f.name]) is not type(f.default) for f in fields(Reading)):
        return None
    found = Reading(**values)  # type: ignore[arg-type]
    return found if 1 <= found.threads <= 64 and 0 <= found.block < 1 << 40 else None


def remember(cache: Path, key: str, reading: Reading) -> None:
    """Keep a measurement. Where that is impossible, the next run measures again."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        known = {**_read(cache), key: asdict(reading)}
        write_atomically(cache / NAME, json.dumps(known, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        _log.info("%s cannot be written (%s)", cache / NAME, error.strerror)


def _read(cache: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((cache / NAME).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _mount(root: Path, number: str) -> tuple[str, str]:
    """File system and source of a device, from /proc/self/mountinfo."""
    with suppress(OSError):
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            own, _, other = line.partition(" - ")
            if own.split()[2:3] == [number] and len(other.split()) >= 2:
                kind, source = other.split()[:2]
                return kind, Path(source).name
    return "?", ""


def _model(root: Path, number: str) -> str:
    """What the drive calls itself; a partition asks the drive that it is on."""
    for place in ("device/model", "../device/model"):
        with suppress(OSError):
            return (root / "sys/dev/block" / number / place).read_text(encoding="utf-8").strip()
    return ""
