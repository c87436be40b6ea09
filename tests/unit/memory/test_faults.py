"""Both readers over a C library whose reads misbehave."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.memory.records import KINDS

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, SHORT_PAGE, SHORT_ODD, INTERRUPTED, AGAIN, NO_DIRECT, BROKEN, ALWAYS_AGAIN };
static int fault, calls;
static char broken_file[4096];
void set_fault(int which) { fault = which; calls = 0; }
void break_file(const char *part) { strcpy(broken_file, part); }

static int is_broken(int fd)
{
    char link[64], path[4096];
    if (!*broken_file) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && (path[length] = 0, strstr(path, broken_file) != NULL);
}

static int refused(int fd)
{
    int call = __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    int direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    if (fault == INTERRUPTED && call % 3) return errno = EINTR;
    if (fault == AGAIN && call % 3) return errno = EAGAIN;
    if (fault == NO_DIRECT && direct) return errno = EINVAL;
    if (fault == BROKEN || is_broken(fd)) return errno = EIO;
    if (fault == ALWAYS_AGAIN) return errno = EAGAIN;
    return 0;
}

static size_t most(size_t nbytes)
{
    size_t limit = fault == SHORT_PAGE ? 4096 : fault == SHORT_ODD ? 1000 : nbytes;
    return nbytes < limit ? nbytes : limit;
}

ssize_t pread(int fd, void *to, size_t nbytes, off_t offset)
{
    ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
    return refused(fd) ? -1 : real(fd, to, most(nbytes), offset);
}
ssize_t pread64(int fd, void *to, size_t nbytes, off_t offset)
{
    return pread(fd, to, nbytes, offset);
}

ssize_t preadv(int fd, const struct iovec *to, int count, off_t offset)
{
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
    struct iovec first = {to->iov_base, most(to->iov_len)};
    return refused(fd) ? -1 : real(fd, &first, 1, offset);
}
ssize_t preadv64(int fd, const struct iovec *to, int count, off_t offset)
{
    return preadv(fd, to, count, offset);
}
ssize_t preadv2(int fd, const struct iovec *to, int count, off_t offset, int flags)
{
    return preadv(fd, to, count, offset);
}
ssize_t preadv64v2(int fd, const struct iovec *to, int count, off_t offset, int flags)
{
    return preadv(fd, to, count, offset);
}
"""

SCRIPT = """
import ctypes, pathlib, sys
import numpy as np
from colibri.errors import ReadError
from colibri.kernels.api import FAILED, READY
from tests.unit.memory.records import library, pieces_model
from colibri.memory.opening import open_store

shim, folder, kind = sys.argv[1:]
set_fault = ctypes.CDLL(shim).set_fault
names = ["none", "short page", "short odd", "interrupted", "again", "no direct", "broken", "always"]
for fault, name in enumerate(names):
    records = pieces_model(pathlib.Path(folder), num_experts=4, shift=4000)
    store = open_store(records.index, [8], library=library(kind), num_threads=2)
    set_fault(fault)
    with store.lease(1, np.arange(4, dtype=np.int32)) as slots:
        for expert, slot in enumerate(slots.tolist()):
            store.table.wait(slot)
            failed = name in ("broken", "always")
            assert store.table.states[slot] == (FAILED if failed else READY), name
            if failed:
                assert isinstance(store.failure(slot), ReadError)
                continue
            starts = store.table.parts[slot].tolist()
            for start, data in zip(starts, records.parts[1, expert], strict=True):
                found = store.table.arena[start : start + data.size]
                assert np.array_equal(found, data), (name, expert)
    assert store.stats.bytes_read == (0 if failed else 4 * records.record_nbytes)
    assert store.stats.failed == (4 if failed else 0)
    set_fault(0)
    store.close()
print("all faults met")
"""

ONE_FILE = """
import ctypes, logging, pathlib, shutil, sys
import numpy as np
from colibri.errors import ReadError
from colibri.kernels.api import FAILED, READY
from colibri.memory.opening import open_store
from colibri.memory.reader_config import ReaderConfig
from tests.unit.memory.records import library, pieces_model

shim, folder, kind = sys.argv[1:]
logging.basicConfig(stream=sys.stdout, format="%(message)s")
model, copy = pathlib.Path(folder, "model"), pathlib.Path(folder, "copy")
model.mkdir()
records = pieces_model(model, num_experts=8, shift=4000)
shutil.copytree(model, copy)
break_file = ctypes.CDLL(shim).break_file

def states(mirrors, broken, rounds=3):
    reader = ReaderConfig(mirrors=mirrors, block=4096)
    store = open_store(records.index, [4], library=library(kind), num_threads=3, reader=reader)
    store.table.wait(0)
    break_file(broken.encode())
    found = set()
    for _ in range(rounds):
        for first in range(0, 8, 2):
            with store.lease(1, np.arange(first, first + 2, dtype=np.int32)) as slots:
                for expert, slot in enumerate(slots.tolist(), first):
                    store.table.wait(slot)
                    state = int(store.table.states[slot])
                    found.add(state)
                    if state == FAILED:
                        error = store.failure(slot)
                        assert isinstance(error, ReadError), error
                        assert "model/shard-1.bin, byte" in str(error), error
                        assert "Input/output error" in str(error), error
                        continue
                    starts = store.table.parts[slot].tolist()
                    for start, data in zip(starts, records.parts[1, expert], strict=True):
                        part = store.table.arena[start : start + data.size]
                        assert np.array_equal(part, data), expert
    stats, given = store.stats, store._reader.stats()
    assert stats.hits + stats.misses == stats.requests
    assert len(store._idle(0)) == 4
    store.close()
    break_file(b"")
    return found, given.rescued

assert states((), "nothing")[0] == {READY}
assert states((), "/model/shard-1.bin") == ({FAILED}, 0)
found, rescued = states((copy,), "/model/shard-1.bin")
assert found == {READY} and rescued > 0, (found, rescued)
found, rescued = states((copy,), "/copy/shard-0.bin")
assert found == {READY} and rescued > 0, (found, rescued)
print("done")
"""

COMPILER = shutil.which("cc")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    source, target = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True
    )
    return target


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs cc and LD_PRELOAD")
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_ends_in_the_right_bytes_or_an_error(
    tmp_path: Path, shim: Path, kind: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, shim, tmp_path, kind],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "all faults met\n", result.stderr


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs cc and LD_PRELOAD")
@pytest.mark.parametrize("kind", KINDS)
def test_one_file_that_cannot_be_read(shim: Path, tmp_path: Path, kind: str) -> None:
    """Alone it fails what is in it, by name; with a mirror, nothing fails on either side."""
    result = subprocess.run(
        [sys.executable, "-c", ONE_FILE, shim, tmp_path, kind],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = result.stdout.splitlines()
    assert told[-1:] == ["done"], result.stderr
    assert len(told) == 2
    assert "copy/shard-0.bin" in told[0]
    assert "Input/output error" in told[0]
