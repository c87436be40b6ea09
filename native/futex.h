/* Sleep on a word and wake its sleepers; elsewhere than on Linux, look again every millisecond. */
#ifndef COLIBRI_FUTEX_H
#define COLIBRI_FUTEX_H

#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <errno.h>
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

/* Sleeps while all n words hold `value`, at most `nanoseconds`; where the system cannot wait for several, on the first. */
static inline void futex_wait_any(const void *const *words, int n, int32_t value, int64_t nanoseconds) {
#if defined(__linux__) && defined(SYS_futex_waitv)
    struct futex_waitv waiters[128];
    const int64_t until = now_ns() + nanoseconds;
    struct timespec limit = {until / 1000000000, until % 1000000000};
    n = n < 128 ? n : 128;
    for (int i = 0; i < n; i++) {
        waiters[i] = (struct futex_waitv){.val = (uint32_t)value, .uaddr = (uintptr_t)words[i], .flags = FUTEX_32 | FUTEX_PRIVATE_FLAG};
    }
    if (syscall(SYS_futex_waitv, waiters, n, 0, &limit, CLOCK_MONOTONIC) >= 0 || errno != ENOSYS) return;
#endif
    (void)n;
    futex_wait(words[0], value, nanoseconds < 1000000 ? nanoseconds : 1000000);
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
