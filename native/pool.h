/* Worker threads that take small chunks of a loop from one atomic counter. */
#ifndef COLIBRI_POOL_H
#define COLIBRI_POOL_H

#include <stdint.h>

#include "colibri.h"

typedef void (*pool_work)(void *arg, int64_t begin, int64_t end);

/* Calls work(arg, begin, end) until [0, items) is covered, by the caller and by workers that are free, and returns
   when all is done. `grain` items go out at a time. A worker that sleeps through the whole job delays nobody. */
void pool_run(colibri_pool *pool, pool_work work, void *arg, int64_t items, int64_t grain);

/* Sends spinning workers to sleep at once: the caller is about to wait for something else. */
void pool_rest(colibri_pool *pool);

int pool_threads(const colibri_pool *pool);

/* A grain that gives each thread several chunks of at most `most` items. */
int64_t pool_grain(const colibri_pool *pool, int64_t items, int64_t most);

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
