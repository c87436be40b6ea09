"""What depends on the operating system: direct reads, page cache, /proc and cgroups.

Everything here has a plain answer where Linux's is missing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DIRECT = getattr(os, "O_DIRECT", 0)


def open_for_reading(path: Path, direct: bool = True) -> tuple[int, bool]:
    """Open with O_DIRECT if `direct` asks and the file system takes it.

    Returns the descriptor and whether reads are direct.

    Raises:
        OSError: the file cannot be opened at all.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    if _DIRECT and direct:
        with suppress(OSError):
            return os.open(path, flags | _DIRECT), True
    return os.open(path, flags), False


def make_buffered(fd: int) -> None:
    """Turn direct reads of an open file off."""
    import fcntl  # exists where O_DIRECT does

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Tell the system that these bytes of the file are not wanted in its cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def malloc_trim() -> None:
    """Give freed heap memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def kilobyte_fields(path: Path) -> dict[str, int]:
    """`Name: 123 kB` lines of a /proc file, in bytes; empty where there is no such file."""
    fields: dict[str, int] = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return fields


def cgroups(root: Path = Path("/")) -> list[Path]:
    """Directories of the memory cgroups that this process is in: of v1, of v2, or of both."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(root / "sys/fs/cgroup" / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            found.append(root / "sys/fs/cgroup/memory" / path.lstrip("/"))
    return [group for group in found if group.is_dir()]


def read_number(path: Path, name: str | None = None) -> int:
    """The number in a file, or beside `name` in one of `name number` lines; 0 without one."""
    for line in _lines(path):
        words = line.split() if name is not None else ["", *line.split()]
        if len(words) == 2 and words[0] == (name or "") and words[1].isdigit():
            return int(words[1])
    return 0


def stall_s(path: Path) -> float:
    """Seconds that some task has waited, of a pressure file; 0 where there is none."""
    for line in _lines(path):
        kind, _, figures = line.partition(" ")
        total = figures.rpartition("total=")[2]
        if kind == "some" and total.isdigit():
            return int(total) / 1e6
    return 0.0


def cgroup_room(root: Path = Path("/")) -> int | None:
    """Bytes that the tightest memory cgroup above this process still allows; None without a limit.

    Inactive file pages count as free: the kernel takes them back before it refuses memory.
    `root` is where /proc and /sys are looked for.
    """
    rooms = [_room(group, *names) for group, names in _limited(root)]
    return min((room for room in rooms if room is not None), default=None)


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the tightest memory cgroup above this process may hold; None without a limit."""
    limits = [_limit(group / names[0]) for group, names in _limited(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limited(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The groups of this process with the names of their files for limit and usage, and of fields.

    They are those from its own up to the mount; in a container its own may not exist.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        if "memory" in controllers.split(","):
            mount /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif controllers != "":
            continue
        inside = mount / path.lstrip("/")
        groups = [inside, *inside.parents] if inside.is_dir() else [mount]
        yield from ((group, names) for group in groups if group.is_relative_to(mount))


def _limit(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    # v1 writes a huge number for "none"
    return int(text) if text.isdigit() and int(text) < 1 << 62 else None


def _room(group: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    limit, usage = _limit(group / limit_name), next(iter(_lines(group / usage_name)), "")
    if limit is None or not usage.isdigit():
        return None
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
    return max(0, limit - int(usage) + int(stat.get(f"{prefix}inactive_file", 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
