/* Placement of memory on NUMA nodes, without libnuma. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "colibri.h"

#include <errno.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

int32_t colibri_place_memory(uint8_t *start, int64_t nbytes, int32_t mode, uint64_t nodes) {
#if defined(__linux__) && defined(SYS_mbind)
    unsigned long mask[64 / (8 * sizeof(unsigned long))];
    for (unsigned i = 0; i < sizeof mask / sizeof *mask; i++)
        mask[i] = (unsigned long)(nodes >> (i * 8 * sizeof *mask));
    /* The kernel wants one bit more than there are. */
    return syscall(SYS_mbind, start, (unsigned long)nbytes, mode, mask, 65UL, 0U) ? errno : 0;
#else
    (void)start, (void)nbytes, (void)mode, (void)nodes;
    return ENOSYS;
#endif
}
