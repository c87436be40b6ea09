"""The drive that a model lies on: what kind it is, how full, and how fast it gives records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from colibri.checkpoint.experts import ExpertIndex
from colibri.lab.doctor.finding import Finding, fault, fine, note, slow
from colibri.lab.doctor.machine import System
from colibri.lab.limits import DriveLimit
from colibri.llm.loading import LoadProgress
from colibri.memory.devices import Reading, mount_of
from colibri.memory.opening import is_measurable
from colibri.memory.system import open_for_reading
from colibri.units import format_bytes

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "afs", "fuse")
_VIRTUAL = ("vd", "xvd")
_IN_MEMORY = ("tmpfs", "ramfs")
_LITTLE_ROOM = 1 << 30  # bytes that heat, sessions and conversions find too few
BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 8)
_SAMPLE_BYTES = 48 << 20
_SLOW_DRIVE = 500e6  # bytes per second below which a frontier model is hardly usable


def drive_findings(
    path: Path, index: ExpertIndex, system: System, progress: LoadProgress
) -> Iterator[Finding]:
    """All checks of this module; `path` is a file of the model."""
    yield check_file_system(path, system)
    yield from check_device(path, system)
    yield check_direct(path)
    yield check_room(path)
    yield check_speed(index, progress)


def check_file_system(path: Path, system: System) -> Finding:
    """Local, remote, or in memory."""
    kind, source = mount_of(path, system.root)
    facts = {"file_system": kind, "source": source}
    if kind.split(".")[0] in _REMOTE:
        return slow(
            "file system",
            f"{kind} from {source}",
            "records come over a network or through another program: usually many times slower "
            "than a local drive",
            "copy the model to a local NVMe drive, or stage the busy experts there: "
            "coli mirror plan",
            **facts,
        )
    if kind in _IN_MEMORY:
        return note(
            "file system",
            kind,
            "the files themselves take the memory that experts could have",
            "keep the model on a drive",
            **facts,
        )
    if kind == "overlay":
        return note(
            "file system",
            "overlay",
            "the model is in a container's layers: direct reads may be slower",
            "mount the model as a volume",
            **facts,
        )
    return fine("file system", f"{kind} on {source}" if source else kind, **facts)


def check_device(path: Path, system: System) -> Iterator[Finding]:
    """Rotating drives and those on USB give records one tenth as fast."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    link = system.root / "sys/dev/block" / number
    queue = next((p for p in (link / "queue", link / "../queue") if p.is_dir()), None)
    if queue is None:
        return
    rotates = (queue / "rotational").read_text(encoding="ascii").strip() == "1"
    drive = link.resolve()
    if drive.name.startswith(_VIRTUAL):  # what lies below, the host knows
        yield fine("device", f"{number}, a virtual drive", usb=False, rotational=None)
    elif "/usb" in str(drive):
        yield slow(
            "device",
            f"{number}, on USB",
            "USB gives 40 to 1000 MB/s, and few requests at a time",
            "move the model to an internal NVMe drive",
            usb=True,
            rotational=rotates,
        )
    elif rotates:
        yield slow(
            "device",
            f"{number}, rotating",
            "each expert is a seek: expect 50 to 150 MB/s",
            "move the model to an NVMe drive",
            usb=False,
            rotational=True,
        )
    else:
        yield fine("device", f"{number}, solid state", usb=False, rotational=False)


def check_direct(path: Path) -> Finding:
    """Whether reads can go past the page cache."""
    fd, direct = open_for_reading(path)
    os.close(fd)
    if direct:
        return fine("direct reads", "possible", direct=True)
    return slow(
        "direct reads",
        "not possible on this file system",
        "records pass the page cache: more processor time, and memory that others could use",
        "keep the model on ext4, xfs or btrfs",
        direct=False,
    )


def check_room(path: Path) -> Finding:
    """Free space beside the model, for heat and conversions."""
    usage = shutil.disk_usage(path.parent)
    shown = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < _LITTLE_ROOM or usage.free < usage.total // 50:
        return slow(
            "disk space",
            shown,
            "heat is not kept where nothing can be written, and full drives read and write slower",
            "delete what is not needed: coli list shows models of the shared cache, coli rm "
            "removes them",
            free_bytes=usage.free,
        )
    return fine("disk space", shown, free_bytes=usage.free)


def check_speed(index: ExpertIndex, progress: LoadProgress) -> Finding:
    """Bytes per second by size and number of reads, of the model's own records."""
    if not is_measurable(index):
        return note(
            "drive speed",
            "not measured: the model's experts are too small to tell",
            "it is read into memory whole",
        )
    rates: dict[tuple[int, int], float] = {}
    with DriveLimit(index, Reading()) as limit:
        for number, block in enumerate(BLOCKS):
            progress("reading records", number, len(BLOCKS))
            for depth in DEPTHS:
                rates[block, depth] = limit.rate(block, depth, _SAMPLE_BYTES)
        progress("reading records", len(BLOCKS), len(BLOCKS))
    return speed_finding(rates, int(np.max(index.nbytes.sum(axis=2))))


def speed_finding(rates: dict[tuple[int, int], float], record_nbytes: int) -> Finding:
    """What rates by block and depth mean for a record."""
    (block, depth), best = max(rates.items(), key=lambda item: item[1])
    shown = (
        f"{best / 1e9:.2f} GB/s, {depth} reads of {format_bytes(block)} at a time; "
        f"{rates[block, min(d for _, d in rates)] / 1e9:.2f} GB/s one at a time"
    )
    table = [{"block": b, "depth": d, "bytes_per_s": rate} for (b, d), rate in rates.items()]
    facts = {"bytes_per_s": best, "record_bytes": record_nbytes, "rates": table}
    if best < _SLOW_DRIVE:
        return slow(
            "drive speed",
            shown,
            f"an expert that is not in memory takes {record_nbytes / best * 1e3:.0f} ms",
            "move the model to an NVMe drive, add a second one (--mirror), or give it more --ram",
            **facts,
        )
    return fine("drive speed", shown, **facts)


def no_files(directory: Path) -> Finding:
    """There is nothing whose drive could be looked at."""
    return fault(
        "drive", f"{directory}: no file of weights", "nothing can be read", "coli pull the model"
    )
