"""A C library between the program and its files, whose reads misbehave as told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc")
needs_shim = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs cc and LD_PRELOAD"
)

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

/* Reads wait while the gate is shut; what was read is written down. */
static int gate_shut, num_seen;
static long seen[256];
void shut_gate(int shut) { __atomic_store_n(&gate_shut, shut, __ATOMIC_RELEASE); }
int num_reads(void) { return __atomic_load_n(&num_seen, __ATOMIC_ACQUIRE); }
long read_at(int i) { return seen[i]; }

static void pass_gate(off_t offset)
{
    int i = __atomic_fetch_add(&num_seen, 1, __ATOMIC_ACQ_REL);
    if (i < 256) seen[i] = offset;
    while (__atomic_load_n(&gate_shut, __ATOMIC_ACQUIRE)) usleep(500);
}

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
    pass_gate(offset);
    return refused(fd) ? -1 : real(fd, to, most(nbytes), offset);
}
ssize_t pread64(int fd, void *to, size_t nbytes, off_t offset)
{
    return pread(fd, to, nbytes, offset);
}

ssize_t preadv(int fd, const struct iovec *to, int count, off_t offset)
{
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
    pass_gate(offset);
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


def compile_shim(folder: Path) -> Path:
    """Build it; returns what to preload."""
    source, target = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(target), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return target


def preloaded(shim: Path) -> dict[str, str]:
    """An environment in which it stands behind what is preloaded already, such as a sanitizer."""
    before = os.environ.get("LD_PRELOAD")
    return {**os.environ, "LD_PRELOAD": f"{before} {shim}" if before else str(shim)}
