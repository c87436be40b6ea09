#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "futex.h"

/* A job's chunks are dealt out in lanes of neighbours, one for each thread, so that every thread reads memory in order;
   who has emptied its own lane takes the last chunks of others'. One word describes a lane: 32 bits of epoch, 16 of the
   end, 16 of the next chunk. A chunk is claimed by a compare-and-swap of the whole word, so a claim can only succeed in
   the epoch it was read in, and while a chunk is unclaimed the job's other fields cannot change. */
enum { MOST_CHUNKS = 0xffff };
static const int64_t SPIN_NS = 60000;    /* longer than Python needs between two calls of a token */
enum { PAUSES_PER_LOOK = 64, PAUSES_BEFORE_YIELD = 4000 };

typedef struct {
    _Alignas(64) atomic_uint_fast64_t word;
    pthread_t thread; /* that takes from its front; the first lane is the caller's */
    colibri_pool *pool;
} lane;

struct colibri_pool {
    _Alignas(64) atomic_uint_fast64_t done; /* chunks finished in this epoch */
    _Alignas(64) atomic_uint epoch;         /* the word workers sleep on */
    atomic_int sleepers;
    atomic_int resting; /* the caller waits for something else: do not spin */
    atomic_int stop;
    _Alignas(64) _Atomic(pool_work) work; /* not on the line that workers look at while it is written */
    _Atomic(void *) arg;
    atomic_int_fast64_t items, grain;
    unsigned forks; /* forks seen when the workers were started */
    uint32_t job; /* epoch of the lanes */
    int num_lanes;
    lane lanes[];
};

/* A forked child has the pool's memory but none of its threads. */
static atomic_uint forks;
static pthread_once_t watch_forks = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void register_fork(void) { pthread_atfork(NULL, NULL, count_fork); }

static inline int64_t end_of(uint64_t word) { return (int64_t)(word >> 16 & 0xffff); }
static inline int64_t next_of(uint64_t word) { return (int64_t)(word & 0xffff); }

/* Claims and does chunks of a lane until none is left: the first ones if it is one's own, else the last. They are counted
   as done at the end, all at once: until then the job cannot end, so they are of one job. */
static void take_chunks(colibri_pool *pool, lane *from, int own) {
    uint_fast64_t word = atomic_load_explicit(&from->word, memory_order_acquire), done = 0;
    while (next_of(word) < end_of(word)) {
        pool_work work = atomic_load_explicit(&pool->work, memory_order_relaxed);
        void *arg = atomic_load_explicit(&pool->arg, memory_order_relaxed);
        int64_t items = atomic_load_explicit(&pool->items, memory_order_relaxed);
        int64_t grain = atomic_load_explicit(&pool->grain, memory_order_relaxed);
        uint_fast64_t claimed = own ? word + 1 : word - (1 << 16);
        if (!atomic_compare_exchange_weak_explicit(&from->word, &word, claimed, memory_order_acq_rel, memory_order_acquire)) continue;
        int64_t begin = (own ? next_of(word) : end_of(word) - 1) * grain;
        int64_t end = begin + grain < items ? begin + grain : items;
        work(arg, begin, end);
        done++;
        word = atomic_load_explicit(&from->word, memory_order_acquire);
    }
    if (done) atomic_fetch_add_explicit(&pool->done, done, memory_order_release);
}

/* Takes part in a job until no chunk of it is unclaimed. */
static void take_part(colibri_pool *pool, int own) {
    take_chunks(pool, &pool->lanes[own], 1);
    for (int i = 1; i < pool->num_lanes; i++) take_chunks(pool, &pool->lanes[(own + i) % pool->num_lanes], 0);
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
    lane *own = arg;
    colibri_pool *pool = own->pool;
    unsigned seen = 0;
    while (!atomic_load_explicit(&pool->stop, memory_order_acquire)) {
        await_job(pool, seen);
        seen = atomic_load_explicit(&pool->epoch, memory_order_acquire);
        take_part(pool, (int)(own - pool->lanes));
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
    if (chunks == 1 || pool->num_lanes == 1 || pool->forks != atomic_load_explicit(&forks, memory_order_relaxed)) {
        work(arg, 0, items);
        return;
    }
    atomic_store_explicit(&pool->work, work, memory_order_relaxed);
    atomic_store_explicit(&pool->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&pool->items, items, memory_order_relaxed);
    atomic_store_explicit(&pool->grain, grain, memory_order_relaxed);
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->resting, 0, memory_order_relaxed);
    pool->job++;
    for (int i = 0; i < pool->num_lanes; i++) {
        const uint64_t first = (uint64_t)(chunks * i / pool->num_lanes), end = (uint64_t)(chunks * (i + 1) / pool->num_lanes);
        atomic_store_explicit(&pool->lanes[i].word, (uint64_t)pool->job << 32 | end << 16 | first, memory_order_release);
    }
    wake(pool, (int)(chunks < pool->num_lanes ? chunks : pool->num_lanes) - 1);
    take_part(pool, 0);
    for (int pauses = 0; atomic_load_explicit(&pool->done, memory_order_acquire) != (uint64_t)chunks; pauses++) {
        if (pauses < PAUSES_BEFORE_YIELD) cpu_pause();
        else sched_yield();
    }
}

void pool_rest(colibri_pool *pool) { atomic_store_explicit(&pool->resting, 1, memory_order_relaxed); }

int pool_threads(const colibri_pool *pool) { return pool->num_lanes; }

int64_t pool_grain(const colibri_pool *pool, int64_t items, int64_t most) {
    int64_t grain = items / ((int64_t)pool_threads(pool) * 8);
    return grain < 1 ? 1 : grain > most ? most : grain;
}

/* Signals are for the caller's threads: a handler must find the thread that waits for input. Returns the lanes there are. */
static int start(colibri_pool *pool) {
    sigset_t all, before;
    int lane = 1;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (lane < pool->num_lanes && !pthread_create(&pool->lanes[lane].thread, NULL, worker, &pool->lanes[lane])) lane++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return lane;
}

colibri_pool *colibri_pool_new(int32_t threads) {
    int lanes = threads > 1 ? threads : 1;
    size_t nbytes = sizeof(colibri_pool) + (size_t)lanes * sizeof(lane);
    colibri_pool *pool = aligned_alloc(64, nbytes);
    if (!pool) return NULL;
    memset(pool, 0, nbytes);
    pthread_once(&watch_forks, register_fork);
    pool->forks = atomic_load(&forks);
    for (int i = 0; i < lanes; i++) pool->lanes[i].pool = pool;
    pool->num_lanes = lanes; /* before any worker looks at it */
    int started = start(pool);
    if (started == lanes) return pool;
    pool->num_lanes = started;
    colibri_pool_free(pool);
    return NULL;
}

void colibri_pool_free(colibri_pool *pool) {
    if (!pool) return;
    if (pool->forks == atomic_load(&forks)) {
        atomic_store(&pool->stop, 1);
        wake(pool, pool->num_lanes);
        for (int i = 1; i < pool->num_lanes; i++) pthread_join(pool->lanes[i].thread, NULL);
    }
    free(pool);
}
