/* The reader of abi_reader.cdef: queues of jobs and the threads that take blocks from them. How a block is read and
 * a record is checked stands in landing.c. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "reader.h"

#include "futex.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { DEMAND = COLIBRI_DEMAND, PREFETCH = COLIBRI_PREFETCH, NUM_QUEUES = COLIBRI_BACKGROUND + 1, NOT_QUEUED = NUM_QUEUES };

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

/* The next piece of the job; `rest` is empty after the last. */
static void advance(colibri_reader *r, job *j) {
    j->rest.piece++;
    j->rest.from = 0;
    j->rest.to = j->rest.piece < j->num_pieces ? whole_pages(pieces_of(r, j->rest.slot) + j->rest.piece) : 0;
}

/* Blocks of a piece are of even size, so that none is a useless sliver. */
static int64_t block_end(const colibri_reader *r, const block *rest) {
    int64_t left = rest->to - rest->from, parts = r->block_nbytes ? (left + r->block_nbytes / 2) / r->block_nbytes : 1;
    if (parts <= 1)
        return rest->to;
    return rest->from + (left / parts + PAGE - 1) / PAGE * PAGE;
}

/* A staging buffer for the job's pieces; returns 0 where none is free. */
static int give_buffer(colibri_reader *r, int32_t slot) {
    job *j = &r->jobs[slot];
    if (!r->num_free)
        return 0;
    j->buffer = r->free_buffers[--r->num_free];
    for (piece *p = r->pieces + (int64_t)slot * r->max_pieces; p < pieces_of(r, slot) + j->num_pieces; p++)
        if (p->staged)
            p->memory = r->staging + j->buffer * r->staging_nbytes;
    return 1;
}

static int32_t next_slot(const colibri_reader *r) {
    for (int queue = DEMAND; queue < NUM_QUEUES; queue++)
        if (r->first[queue] >= 0)
            return r->first[queue];
    return -1;
}

static int take(colibri_reader *r, block *taken) {
    int32_t slot = next_slot(r);
    if (slot < 0)
        return 0;
    job *j = &r->jobs[slot];
    if (j->buffer == NEEDS_BUFFER && !give_buffer(r, slot))
        return 0; /* until some other record has landed */
    *taken = j->rest;
    if (!j->times[1])
        j->times[1] = now_ns();
    j->rest.from = taken->to = block_end(r, taken);
    j->in_flight++;
    if (j->rest.from == j->rest.to)
        advance(r, j);
    if (j->rest.piece == j->num_pieces)
        unlink_job(r, slot);
    return 1;
}

/* Returns whether this was the last block of its job. After a failure no more of them are handed out. */
static int finish(colibri_reader *r, const block *b, int32_t drive, uint32_t sum, const colibri_failure *failure) {
    job *j = &r->jobs[b->slot];
    const piece *p = pieces_of(r, b->slot) + b->piece;
    j->in_flight--;
    j->used |= 1u << drive;
    if (failure->reason && !j->failure.reason)
        j->failure = *failure;
    if (!failure->reason)
        j->done_nbytes += useful_end(p, b) - useful_start(p, b), j->sum ^= sum;
    if (j->failure.reason && j->queue != NOT_QUEUED)
        unlink_job(r, b->slot);
    return !j->in_flight && j->queue == NOT_QUEUED;
}

static void publish(colibri_reader *r, int32_t slot, int32_t state) {
    r->jobs[slot].times[2] = now_ns();
    __atomic_store_n(&r->states[slot], state, __ATOMIC_RELEASE);
    futex_wake(&r->states[slot], INT_MAX);
}

/* All blocks are finished, and this thread alone looks at the job. */
static void land(colibri_reader *r, int32_t slot) {
    job *j = &r->jobs[slot];
    int cancelled = j->failure.reason == COLIBRI_READ_CANCELLED;
    if (!j->failure.reason) {
        int64_t nbytes = 0;
        for (const piece *p = pieces_of(r, slot); p < pieces_of(r, slot) + j->num_pieces; p++)
            nbytes += p->nbytes;
        count(&r->stats.bytes_read, nbytes);
        count(&r->stats.records, 1);
        if (!landing_check(r, slot, &j->failure))
            j->failure.reason = 0;
    }
    if (j->failure.reason && !cancelled)
        count(&r->stats.failed, 1);
    if (cancelled)
        count(&r->stats.abandoned_bytes, j->done_nbytes);
    publish(r, slot, j->failure.reason ? COLIBRI_SLOT_FAILED : COLIBRI_SLOT_READY);
}

static void *work(void *argument) {
    colibri_reader *r = argument;
    pthread_mutex_lock(&r->mutex);
    while (!r->closing) {
        block b;
        if (!take(r, &b)) {
            r->idle++;
            pthread_cond_wait(&r->wake, &r->mutex);
            r->idle--;
            continue;
        }
        /* Threads wake one another, so that whoever submits pays for one system call and not for all. */
        int wake = r->idle > 0 && next_slot(r) >= 0;
        pthread_mutex_unlock(&r->mutex);
        if (wake)
            pthread_cond_signal(&r->wake);
        int32_t drive = 0;
        uint32_t sum = 0;
        colibri_failure failure = {.reason = 0};
        if (!landing_read(r, &b, &drive, &failure)) {
            failure.reason = 0; /* another drive had it */
            sum = landing_sum(r, &b);
        }
        pthread_mutex_lock(&r->mutex);
        if (finish(r, &b, drive, sum, &failure)) {
            const int32_t buffer = r->jobs[b.slot].buffer; /* the slot's next job may come as soon as it has landed */
            pthread_mutex_unlock(&r->mutex);
            land(r, b.slot);
            pthread_mutex_lock(&r->mutex);
            if (buffer >= 0)
                r->free_buffers[r->num_free++] = buffer;
        }
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
                                      int32_t max_pieces, const colibri_drives *drives, int32_t num_threads,
                                      int64_t block_nbytes, uint8_t *staging, int64_t staging_nbytes, int32_t num_staging) {
    colibri_reader *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    int32_t num_fds = drives->num_drives * drives->num_files;
    r->arena = arena, r->parts = parts, r->states = states, r->num_slots = num_slots, r->max_pieces = max_pieces;
    r->num_drives = drives->num_drives, r->num_files = drives->num_files, r->keep_cache = drives->keep_cache;
    r->staging = staging, r->staging_nbytes = staging_nbytes;
    while (r->num_free < num_staging && r->num_free < MAX_BUFFERS) {
        r->free_buffers[r->num_free] = r->num_free;
        r->num_free++;
    }
    r->block_nbytes = (block_nbytes + PAGE - 1) / PAGE * PAGE;
    for (int32_t d = 0; d < r->num_drives; d++)
        r->weights[d] = drives->weights[d] > 0 ? drives->weights[d] : 1;
    for (int queue = DEMAND; queue < NUM_QUEUES; queue++)
        r->first[queue] = r->last[queue] = -1;
    r->jobs = calloc((size_t)num_slots + 1, sizeof *r->jobs);
    r->pieces = calloc((size_t)num_slots * (size_t)max_pieces + 1, sizeof *r->pieces);
    r->fds = copied(drives->fds, num_fds);
    r->direct = copied(drives->direct, num_fds);
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

void colibri_reader_submit(colibri_reader *r, int32_t num_jobs, const colibri_jobs *jobs) {
    const int64_t now = now_ns();
    pthread_mutex_lock(&r->mutex);
    for (int32_t i = 0; i < num_jobs; i++) {
        int32_t slot = jobs->slots[i];
        job *j = &r->jobs[slot];
        __atomic_load_n(&r->states[slot], __ATOMIC_ACQUIRE); /* after all that its last job did: Python looked without a fence */
        memcpy(j->parts, r->parts + slot * 3LL, sizeof j->parts);
        j->packings = jobs->packings, j->num_packings = jobs->num_packings, j->base = jobs->bases ? jobs->bases[i] : 0;
        j->buffer = jobs->staged ? NEEDS_BUFFER : NO_BUFFER;
        j->scans = jobs->scans, j->num_scans = jobs->num_scans, j->num_pieces = 0;
        j->crc = jobs->crcs ? jobs->crcs[i] : 0;
        j->check = !jobs->crcs ? COLIBRI_CHECK_NEVER : jobs->checks ? jobs->checks[i] : COLIBRI_CHECK_ALWAYS;
        j->drives = (jobs->drives ? jobs->drives[i] : 0) | 1u;
        j->used = 0, j->in_flight = 0, j->done_nbytes = 0, j->sum = 0, j->failure.reason = 0;
        j->times[0] = now, j->times[1] = j->times[2] = 0;
        for (int64_t k = (int64_t)i * jobs->num_pieces; k < (int64_t)(i + 1) * jobs->num_pieces; k++)
            if (jobs->nbytes[k])
                r->pieces[(int64_t)slot * r->max_pieces + j->num_pieces++] =
                    (piece){.offset = jobs->offsets[k], .nbytes = jobs->nbytes[k], .target = jobs->targets[k], .memory = r->arena,
                            .file = jobs->files[k], .staged = jobs->staged && jobs->staged[k % jobs->num_pieces]};
        j->rest = (block){.slot = slot, .piece = -1};
        advance(r, j);
        __atomic_store_n(&r->states[slot], COLIBRI_SLOT_LOADING, __ATOMIC_RELEASE);
        append(r, slot, jobs->queue);
    }
    int wake = r->idle > 0;
    pthread_mutex_unlock(&r->mutex);
    if (wake)
        pthread_cond_signal(&r->wake);
}

int32_t colibri_reader_promote(colibri_reader *r, int32_t slot, int32_t queue) {
    pthread_mutex_lock(&r->mutex);
    int32_t waits = r->jobs[slot].queue > queue && r->jobs[slot].queue != NOT_QUEUED;
    if (waits) {
        unlink_job(r, slot);
        append(r, slot, queue);
    }
    pthread_mutex_unlock(&r->mutex);
    return waits;
}

/* Nobody waits for the job any more; the caller holds the mutex. */
static void cancel(colibri_reader *r, int32_t slot) {
    job *j = &r->jobs[slot];
    unlink_job(r, slot);
    j->failure = (colibri_failure){.reason = COLIBRI_READ_CANCELLED, .part = -1};
    if (j->in_flight) /* the thread that finishes its last block says so */
        return;
    if (j->buffer >= 0)
        r->free_buffers[r->num_free++] = j->buffer;
    count(&r->stats.abandoned_bytes, j->done_nbytes);
    publish(r, slot, COLIBRI_SLOT_FAILED);
}

int32_t colibri_reader_withdraw(colibri_reader *r, int32_t slot) {
    pthread_mutex_lock(&r->mutex);
    job *j = &r->jobs[slot];
    int32_t waits = j->queue > DEMAND && j->queue < NUM_QUEUES && (j->queue == PREFETCH || !j->times[1]);
    if (waits)
        cancel(r, slot);
    pthread_mutex_unlock(&r->mutex);
    return waits;
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

int32_t colibri_reader_times(colibri_reader *r, int32_t slot, int64_t times[3]) {
    __atomic_load_n(&r->states[slot], __ATOMIC_ACQUIRE);
    pthread_mutex_lock(&r->mutex);
    memcpy(times, r->jobs[slot].times, sizeof r->jobs[slot].times);
    int32_t reason = r->jobs[slot].failure.reason;
    pthread_mutex_unlock(&r->mutex);
    return reason;
}

void colibri_reader_queues(colibri_reader *r, int32_t counts[4]) {
    memset(counts, 0, (NUM_QUEUES + 1) * sizeof *counts);
    pthread_mutex_lock(&r->mutex);
    for (int queue = DEMAND; queue < NUM_QUEUES; queue++)
        for (int32_t slot = r->first[queue]; slot >= 0; slot = r->jobs[slot].next)
            counts[queue]++;
    for (int32_t slot = 0; slot < r->num_slots; slot++)
        counts[NUM_QUEUES] += r->jobs[slot].in_flight;
    pthread_mutex_unlock(&r->mutex);
}

uint32_t colibri_reader_dropped(colibri_reader *r) { return __atomic_load_n(&r->dropped, __ATOMIC_ACQUIRE); }

void colibri_reader_drive(colibri_reader *r, int32_t drive, int64_t *nbytes, colibri_failure *failure) {
    pthread_mutex_lock(&r->mutex);
    *nbytes = __atomic_load_n(&r->drive_bytes[drive], __ATOMIC_RELAXED);
    *failure = r->drops[drive];
    pthread_mutex_unlock(&r->mutex);
}

void colibri_reader_get_stats(colibri_reader *r, colibri_reader_stats *stats) {
    int64_t *from = (int64_t *)&r->stats, *to = (int64_t *)stats;
    for (size_t i = 0; i < sizeof *stats / sizeof *to; i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

static void cancel_queued(colibri_reader *r) {
    for (int queue = DEMAND; queue < NUM_QUEUES; queue++)
        for (int32_t slot = r->first[queue]; slot >= 0; slot = r->first[queue])
            cancel(r, slot);
}

void colibri_reader_close(colibri_reader *r) {
    pthread_mutex_lock(&r->mutex);
    r->closing = 1;
    cancel_queued(r);
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->mutex);
    for (int32_t i = 0; i < r->num_threads; i++)
        pthread_join(r->threads[i], NULL);
    pthread_cond_destroy(&r->wake);
    pthread_mutex_destroy(&r->mutex);
    release(r);
}
