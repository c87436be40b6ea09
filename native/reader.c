/* The reader of abi_reader.cdef. Linux specifics: O_DIRECT, posix_fadvise and (in futex.h) the futex. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "colibri.h"

#include "futex.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096
#define MAX_THREADS 16
#define MAX_RETRIES 1000 /* of one read that is interrupted or told to try again */

enum { DEMAND = 0, PREFETCH = 1, NOT_QUEUED = 2 };
enum { FLOAT_F32 = 0, FLOAT_F16 = 1 }; /* Format.code; the third is bf16 */

typedef struct {
    int64_t offset, nbytes, target;
    int32_t file;
} piece;

typedef struct {
    const colibri_scan *scans;
    int32_t num_scans, num_pieces;
    uint32_t crc;
    int8_t has_crc, queue;
    int32_t next, previous; /* slots, -1 at an end */
    colibri_failure failure;
} job;

struct colibri_reader {
    uint8_t *arena;
    const int64_t *parts;
    int32_t *states;
    job *jobs;     /* [num_slots] */
    piece *pieces; /* [num_slots][max_pieces] */
    int32_t *fds, *direct;
    int32_t max_pieces, num_threads, closing;
    int32_t first[2], last[2]; /* slots, -1 where a queue is empty */
    colibri_reader_stats stats;
    pthread_mutex_t mutex; /* guards queues and `closing` */
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
};

/* ---- Queues: linked lists over slot numbers, so bounded and with nothing to allocate. The caller holds the mutex. */

static void append(colibri_reader *r, int32_t slot, int queue) {
    job *j = &r->jobs[slot];
    j->queue = (int8_t)queue;
    j->next = -1;
    j->previous = r->last[queue];
    if (j->previous < 0)
        r->first[queue] = slot;
    else
        r->jobs[j->previous].next = slot;
    r->last[queue] = slot;
}

static void unlink_job(colibri_reader *r, int32_t slot) {
    job *j = &r->jobs[slot];
    if (j->previous < 0)
        r->first[j->queue] = j->next;
    else
        r->jobs[j->previous].next = j->next;
    if (j->next < 0)
        r->last[j->queue] = j->previous;
    else
        r->jobs[j->next].previous = j->previous;
    j->queue = NOT_QUEUED;
}

static int32_t take(colibri_reader *r) {
    int32_t slot = r->first[DEMAND] >= 0 ? r->first[DEMAND] : r->first[PREFETCH];
    if (slot >= 0)
        unlink_job(r, slot);
    return slot;
}

static void publish(colibri_reader *r, int32_t slot, int32_t state) {
    __atomic_store_n(&r->states[slot], state, __ATOMIC_RELEASE);
    futex_wake(&r->states[slot], INT_MAX);
}

static void count(int64_t *counter, int64_t amount) { __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED); }

/* ---- One read. Functions return 0, or a reason with `failure` filled in. */

static int failed(colibri_failure *failure, int reason, int error, int32_t file, int64_t offset) {
    *failure = (colibri_failure){.reason = reason, .error = error, .file = file, .part = -1, .offset = offset};
    return reason;
}

static ssize_t pread_patiently(int fd, void *to, int64_t nbytes, int64_t offset) {
    for (int attempt = 0;; attempt++) {
        ssize_t got = pread(fd, to, (size_t)nbytes, offset);
        if (got >= 0 || (errno != EINTR && errno != EAGAIN) || attempt == MAX_RETRIES)
            return got;
        sched_yield();
    }
}

static int read_buffered(colibri_reader *r, const piece *p, colibri_failure *failure) {
    uint8_t *to = r->arena + p->target + p->offset % PAGE;
    for (int64_t done = 0; done < p->nbytes;) {
        ssize_t got = pread_patiently(r->fds[p->file], to + done, p->nbytes - done, p->offset + done);
        if (got < 0)
            return failed(failure, COLIBRI_READ_IO, errno, p->file, p->offset + done);
        if (got == 0)
            return failed(failure, COLIBRI_READ_TRUNCATED, 0, p->file, p->offset + done);
        count(&r->stats.reads, 1);
        done += got;
    }
#if defined(POSIX_FADV_DONTNEED)
    posix_fadvise(r->fds[p->file], p->offset, p->nbytes, POSIX_FADV_DONTNEED);
#endif
    return 0;
}

/* The aligned range around the piece. Returns -1 where this file does not take direct reads after all: it
 * refuses them, or ends one short of a page without being at its end. */
static int read_direct(colibri_reader *r, const piece *p, colibri_failure *failure) {
    int64_t skip = p->offset % PAGE, start = p->offset - skip, wanted = skip + p->nbytes;
    int64_t whole = (wanted + PAGE - 1) / PAGE * PAGE, done = 0;
    while (done < wanted) {
        ssize_t got = pread_patiently(r->fds[p->file], r->arena + p->target + done, whole - done, start + done);
        if (got < 0 && errno == EINVAL)
            return -1;
        if (got < 0)
            return failed(failure, COLIBRI_READ_IO, errno, p->file, start + done);
        if (got == 0)
            return failed(failure, COLIBRI_READ_TRUNCATED, 0, p->file, start + done);
        count(&r->stats.reads, 1);
        done += got;
        if (done < wanted && done % PAGE)
            return -1;
    }
    count(&r->stats.slack_bytes, done - p->nbytes);
    return 0;
}

static int read_piece(colibri_reader *r, const piece *p, colibri_failure *failure) {
#if defined(O_DIRECT)
    if (__atomic_load_n(&r->direct[p->file], __ATOMIC_RELAXED)) {
        int reason = read_direct(r, p, failure);
        if (reason >= 0)
            return reason;
        /* Flags belong to the open file: reads of other threads turn buffered too, which is as good. */
        int flags = fcntl(r->fds[p->file], F_GETFL);
        if (flags < 0 || fcntl(r->fds[p->file], F_SETFL, flags & ~O_DIRECT) < 0)
            return failed(failure, COLIBRI_READ_IO, errno, p->file, p->offset);
        __atomic_store_n(&r->direct[p->file], 0, __ATOMIC_RELAXED);
    }
#endif
    return read_buffered(r, p, failure);
}

/* ---- Checks at landing. Files promise no alignment, hence the types. */

typedef uint16_t __attribute__((aligned(1), may_alias)) loose16;
typedef uint32_t __attribute__((aligned(1), may_alias)) loose32;

static int finite16(const uint8_t *data, int64_t nbytes, uint16_t exponent) {
    const loose16 *items = (const loose16 *)data;
    uint16_t bad = 0;
    for (int64_t i = 0; i < nbytes / 2; i++)
        bad |= (items[i] & exponent) == exponent;
    return !bad;
}

static int finite32(const uint8_t *data, int64_t nbytes) {
    const loose32 *items = (const loose32 *)data;
    uint32_t bad = 0;
    for (int64_t i = 0; i < nbytes / 4; i++)
        bad |= (items[i] & 0x7F800000u) == 0x7F800000u;
    return !bad;
}

static int all_finite(const uint8_t *data, int64_t nbytes, int64_t format) {
    if (format == FLOAT_F32)
        return finite32(data, nbytes);
    return finite16(data, nbytes, format == FLOAT_F16 ? 0x7C00 : 0x7F80);
}

static int check_floats(colibri_reader *r, int32_t slot, const piece *where) {
    job *j = &r->jobs[slot];
    for (const colibri_scan *s = j->scans; s < j->scans + j->num_scans; s++) {
        const uint8_t *data = r->arena + r->parts[slot * 3LL + s->part] + s->offset;
        for (int64_t i = 0; i < s->count; i++)
            if (!all_finite(data + i * s->stride, s->nbytes, s->format)) {
                failed(&j->failure, COLIBRI_READ_NOT_FINITE, 0, where->file, where->offset);
                j->failure.part = (int32_t)s->part;
                return COLIBRI_READ_NOT_FINITE;
            }
    }
    return 0;
}

static int land(colibri_reader *r, int32_t slot) {
    job *j = &r->jobs[slot];
    const piece *first = &r->pieces[(int64_t)slot * r->max_pieces];
    uint32_t crc = 0;
    int64_t nbytes = 0;
    for (const piece *p = first; p < first + j->num_pieces; p++) {
        int reason = read_piece(r, p, &j->failure);
        if (reason)
            return reason;
        if (j->has_crc)
            crc = colibri_crc32c(crc, r->arena + p->target + p->offset % PAGE, p->nbytes);
        nbytes += p->nbytes;
    }
    count(&r->stats.bytes_read, nbytes);
    count(&r->stats.records, 1);
    if (j->has_crc && crc != j->crc)
        return failed(&j->failure, COLIBRI_READ_CHECKSUM, 0, first->file, first->offset);
    return check_floats(r, slot, first);
}

static void *work(void *argument) {
    colibri_reader *r = argument;
    pthread_mutex_lock(&r->mutex);
    while (!r->closing) {
        int32_t slot = take(r);
        if (slot < 0) {
            pthread_cond_wait(&r->wake, &r->mutex);
            continue;
        }
        pthread_mutex_unlock(&r->mutex);
        int reason = land(r, slot);
        if (reason)
            count(&r->stats.failed, 1);
        publish(r, slot, reason ? COLIBRI_SLOT_FAILED : COLIBRI_SLOT_READY);
        pthread_mutex_lock(&r->mutex);
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

/* ---- What Python calls. */

static void release(colibri_reader *r) {
    free(r->jobs);
    free(r->pieces);
    free(r->fds);
    free(r->direct);
    free(r);
}

static int32_t *copied(const int32_t *items, int32_t num_items) {
    int32_t *copy = malloc(sizeof *copy * (size_t)(num_items + 1));
    if (copy)
        memcpy(copy, items, sizeof *copy * (size_t)num_items);
    return copy;
}

/* Signals are for the caller's threads: Ctrl-C must not interrupt a read. */
static int start(colibri_reader *r, int32_t num_threads) {
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && r->num_threads < num_threads && r->num_threads < MAX_THREADS) {
        error = pthread_create(&r->threads[r->num_threads], NULL, work, r);
        r->num_threads += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return r->num_threads ? 0 : error;
}

colibri_reader *colibri_reader_create(uint8_t *arena, const int64_t *parts, int32_t *states, int32_t num_slots,
                                      int32_t max_pieces, const int32_t *fds, const int32_t *direct,
                                      int32_t num_files, int32_t num_threads) {
    colibri_reader *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->arena = arena, r->parts = parts, r->states = states, r->max_pieces = max_pieces;
    r->first[DEMAND] = r->first[PREFETCH] = r->last[DEMAND] = r->last[PREFETCH] = -1;
    r->jobs = calloc((size_t)num_slots + 1, sizeof *r->jobs);
    r->pieces = calloc((size_t)num_slots * (size_t)max_pieces + 1, sizeof *r->pieces);
    r->fds = copied(fds, num_files);
    r->direct = copied(direct, num_files);
    for (int32_t slot = 0; r->jobs && slot < num_slots; slot++)
        r->jobs[slot].queue = NOT_QUEUED;
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->wake, NULL);
    int error = r->jobs && r->pieces && r->fds && r->direct ? start(r, num_threads) : ENOMEM;
    if (!error)
        return r;
    release(r);
    errno = error;
    return NULL;
}

void colibri_reader_submit(colibri_reader *r, int32_t num_jobs, const int32_t *slots, int32_t num_pieces,
                           const int32_t *files, const int64_t *offsets, const int64_t *nbytes,
                           const int64_t *targets, const uint32_t *crcs, const colibri_scan *scans,
                           int32_t num_scans, int32_t prefetch) {
    pthread_mutex_lock(&r->mutex);
    for (int32_t i = 0; i < num_jobs; i++) {
        int32_t slot = slots[i];
        job *j = &r->jobs[slot];
        j->scans = scans, j->num_scans = num_scans, j->num_pieces = 0;
        j->has_crc = crcs != NULL;
        j->crc = crcs ? crcs[i] : 0;
        for (int64_t k = (int64_t)i * num_pieces; k < (int64_t)(i + 1) * num_pieces; k++)
            if (nbytes[k])
                r->pieces[(int64_t)slot * r->max_pieces + j->num_pieces++] =
                    (piece){.offset = offsets[k], .nbytes = nbytes[k], .target = targets[k], .file = files[k]};
        __atomic_store_n(&r->states[slot], COLIBRI_SLOT_LOADING, __ATOMIC_RELEASE);
        append(r, slot, prefetch ? PREFETCH : DEMAND);
    }
    if (num_jobs > 1)
        pthread_cond_broadcast(&r->wake);
    else
        pthread_cond_signal(&r->wake);
    pthread_mutex_unlock(&r->mutex);
}

void colibri_reader_promote(colibri_reader *r, int32_t slot) {
    pthread_mutex_lock(&r->mutex);
    if (r->jobs[slot].queue == PREFETCH) {
        unlink_job(r, slot);
        append(r, slot, DEMAND);
    }
    pthread_mutex_unlock(&r->mutex);
}

int32_t colibri_slot_wait(const int32_t *state, int32_t timeout_ms) {
    int32_t now = __atomic_load_n(state, __ATOMIC_ACQUIRE);
    if (now != COLIBRI_SLOT_LOADING)
        return now;
    futex_wait(state, COLIBRI_SLOT_LOADING, timeout_ms * 1000000LL);
    return __atomic_load_n(state, __ATOMIC_ACQUIRE);
}

void colibri_reader_failure(colibri_reader *r, int32_t slot, colibri_failure *failure) {
    __atomic_load_n(&r->states[slot], __ATOMIC_ACQUIRE);
    *failure = r->jobs[slot].failure;
}

void colibri_reader_get_stats(colibri_reader *r, colibri_reader_stats *stats) {
    int64_t *from = (int64_t *)&r->stats, *to = (int64_t *)stats;
    for (size_t i = 0; i < sizeof *stats / sizeof *to; i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

void colibri_reader_close(colibri_reader *r) {
    pthread_mutex_lock(&r->mutex);
    r->closing = 1;
    for (int32_t slot = take(r); slot >= 0; slot = take(r)) {
        failed(&r->jobs[slot].failure, COLIBRI_READ_CANCELLED, 0, 0, 0);
        publish(r, slot, COLIBRI_SLOT_FAILED);
    }
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->mutex);
    for (int32_t i = 0; i < r->num_threads; i++)
        pthread_join(r->threads[i], NULL);
    pthread_cond_destroy(&r->wake);
    pthread_mutex_destroy(&r->mutex);
    release(r);
}
