/* Preloaded: counts allocations, locks and system calls that are asked for from addresses [low, high), the library's code. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static uintptr_t low, high;
static int64_t allocations, locks, calls;

void count_from(uintptr_t first, uintptr_t end) {
    low = first, high = end;
    allocations = locks = calls = 0;
}

void counted(int64_t out[3]) { out[0] = allocations, out[1] = locks, out[2] = calls; }

static void count(int64_t *counter, void *caller) {
    if ((uintptr_t)caller - low < high - low) __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

#define HERE __builtin_return_address(0)

void *malloc(size_t n) { return count(&allocations, HERE), __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return count(&allocations, HERE), __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return count(&allocations, HERE), __libc_realloc(p, n); }
void *aligned_alloc(size_t align, size_t n) { return count(&allocations, HERE), __libc_memalign(align, n); }

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    static int (*real)(pthread_mutex_t *);
    if (!real) real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    count(&locks, HERE);
    return real(mutex);
}

int sched_yield(void) {
    static int (*real)(void);
    if (!real) real = (int (*)(void))dlsym(RTLD_NEXT, "sched_yield");
    count(&calls, HERE);
    return real();
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    count(&calls, HERE);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
