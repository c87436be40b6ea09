/* Sleep on a word and wake its sleepers; elsewhere than on Linux, look again every millisecond. */
#ifndef COLIBRI_FUTEX_H
#define COLIBRI_FUTEX_H

#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Returns when the 32-bit `word` is not `value`, when it is woken, after `nanoseconds` (negative: never), or for
 * no reason: call it in a loop. */
static inline void futex_wait(const volatile void *word, int32_t value, int64_t nanoseconds) {
#if defined(__linux__)
    struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nanoseconds < 0 ? NULL : &limit, NULL, 0);
#else
    struct timespec limit = {0, nanoseconds < 0 || nanoseconds > 1000000 ? 1000000 : nanoseconds};
    if (__atomic_load_n((const volatile int32_t *)word, __ATOMIC_ACQUIRE) == value)
        nanosleep(&limit, NULL);
#endif
}

/* Wakes at most `count` sleepers. */
static inline void futex_wake(const volatile void *word, int count) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
#else
    (void)word, (void)count;
#endif
}

#endif
