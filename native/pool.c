#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "futex.h"

/* One word describes the job: 32 bits of epoch, 16 of chunks, 16 of the next chunk. A chunk is claimed by a
   compare-and-swap of the whole word, so a claim can only succeed in the epoch it was read in, and while a chunk is
   unclaimed the job's other fields cannot change. */
enum { MOST_CHUNKS = 0xffff };
static const int64_t SPIN_NS = 60000;    /* longer than Python needs between two calls of a token */
enum { PAUSES_PER_LOOK = 64, PAUSES_BEFORE_YIELD = 4000 };

struct colibri_pool {
    _Alignas(64) atomic_uint_fast64_t job;
    _Alignas(64) atomic_uint_fast64_t done; /* chunks finished in this epoch */
    _Alignas(64) atomic_uint epoch;         /* the word workers sleep on */
    atomic_int sleepers;
    atomic_int resting; /* the caller waits for something else: do not spin */
    atomic_int stop;
    _Atomic(pool_work) work;
    _Atomic(void *) arg;
    atomic_int_fast64_t items, grain;
    unsigned forks; /* forks seen when the workers were started */
    int num_workers;
    pthread_t workers[];
};

/* A forked child has the pool's memory but none of its threads. */
static atomic_uint forks;
static pthread_once_t watch_forks = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void register_fork(void) { pthread_atfork(NULL, NULL, count_fork); }

static inline int64_t chunks_of(uint64_t job) { return (int64_t)(job >> 16 & 0xffff); }
static inline int64_t next_of(uint64_t job) { return (int64_t)(job & 0xffff); }

/* Claims and does chunks until none is left; returns how many it did. */
static void take_chunks(colibri_pool *pool) {
    uint_fast64_t job = atomic_load_explicit(&pool->job, memory_order_acquire);
    while (next_of(job) < chunks_of(job)) {
        pool_work work = atomic_load_explicit(&pool->work, memory_order_relaxed);
        void *arg = atomic_load_explicit(&pool->arg, memory_order_relaxed);
        int64_t items = atomic_load_explicit(&pool->items, memory_order_relaxed);
        int64_t grain = atomic_load_explicit(&pool->grain, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&pool->job, &job, job + 1, memory_order_acq_rel, memory_order_acquire)) continue;
        int64_t begin = next_of(job) * grain;
        int64_t end = begin + grain < items ? begin + grain : items;
        work(arg, begin, end);
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
        job = atomic_load_explicit(&pool->job, memory_order_acquire);
    }
}

/* Returns when there may be something to do: spins for a while, then sleeps. */
static void await_job(colibri_pool *pool, unsigned seen) {
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            if (atomic_load_explicit(&pool->epoch, memory_order_acquire) != seen) return;
            cpu_pause();
        }
    } while (!atomic_load_explicit(&pool->resting, memory_order_relaxed) && now_ns() < end);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->epoch) == seen) futex_wait(&pool->epoch, (int32_t)seen, -1);
    atomic_fetch_sub(&pool->sleepers, 1);
}

static void *worker(void *arg) {
    colibri_pool *pool = arg;
    unsigned seen = 0;
    while (!atomic_load_explicit(&pool->stop, memory_order_acquire)) {
        await_job(pool, seen);
        seen = atomic_load_explicit(&pool->epoch, memory_order_acquire);
        take_chunks(pool);
    }
    return NULL;
}

static void wake(colibri_pool *pool, int count) {
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers) > 0) futex_wake(&pool->epoch, count);
}

void pool_run(colibri_pool *pool, pool_work work, void *arg, int64_t items, int64_t grain) {
    if (items <= 0) return;
    if (grain < 1) grain = 1;
    if ((items + grain - 1) / grain > MOST_CHUNKS) grain = (items + MOST_CHUNKS - 1) / MOST_CHUNKS;
    int64_t chunks = (items + grain - 1) / grain;
    if (chunks == 1 || pool->num_workers == 0 || pool->forks != atomic_load_explicit(&forks, memory_order_relaxed)) {
        work(arg, 0, items);
        return;
    }
    atomic_store_explicit(&pool->work, work, memory_order_relaxed);
    atomic_store_explicit(&pool->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&pool->items, items, memory_order_relaxed);
    atomic_store_explicit(&pool->grain, grain, memory_order_relaxed);
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->resting, 0, memory_order_relaxed);
    uint64_t epoch = (atomic_load_explicit(&pool->job, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool->job, epoch << 32 | (uint64_t)chunks << 16);
    wake(pool, chunks - 1 < pool->num_workers ? (int)chunks - 1 : pool->num_workers);
    take_chunks(pool);
    for (int pauses = 0; atomic_load_explicit(&pool->done, memory_order_acquire) != (uint64_t)chunks; pauses++) {
        if (pauses < PAUSES_BEFORE_YIELD) cpu_pause();
        else sched_yield();
    }
}

void pool_rest(colibri_pool *pool) { atomic_store_explicit(&pool->resting, 1, memory_order_relaxed); }

int pool_threads(const colibri_pool *pool) { return pool->num_workers + 1; }

int64_t pool_grain(const colibri_pool *pool, int64_t items, int64_t most) {
    int64_t grain = items / ((int64_t)pool_threads(pool) * 8);
    return grain < 1 ? 1 : grain > most ? most : grain;
}

colibri_pool *colibri_pool_new(int32_t threads) {
    int workers = threads > 1 ? threads - 1 : 0;
    size_t nbytes = (sizeof(colibri_pool) + (size_t)workers * sizeof(pthread_t) + 63) / 64 * 64;
    colibri_pool *pool = aligned_alloc(64, nbytes);
    if (!pool) return NULL;
    *pool = (colibri_pool){0};
    pthread_once(&watch_forks, register_fork);
    pool->forks = atomic_load(&forks);
    for (; pool->num_workers < workers; pool->num_workers++) {
        if (pthread_create(&pool->workers[pool->num_workers], NULL, worker, pool)) {
            colibri_pool_free(pool);
            return NULL;
        }
    }
    return pool;
}

void colibri_pool_free(colibri_pool *pool) {
    if (!pool) return;
    if (pool->forks == atomic_load(&forks)) {
        atomic_store(&pool->stop, 1);
        wake(pool, pool->num_workers);
        for (int i = 0; i < pool->num_workers; i++) pthread_join(pool->workers[i], NULL);
    }
    free(pool);
}
