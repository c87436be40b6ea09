/* What reader.c (queues and threads) and landing.c (reads and checks) share. */
#ifndef COLIBRI_NATIVE_READER_H
#define COLIBRI_NATIVE_READER_H

#include "colibri.h"

#include <pthread.h>

#define PAGE 4096
#define MAX_THREADS 64
#define MAX_BUFFERS 16
#define MAX_PIECES 16
#define NO_BUFFER -1
#define NEEDS_BUFFER -2

typedef struct {
    int64_t offset, nbytes, target; /* the target counts from `memory` */
    uint8_t *memory;
    int32_t file;
    int32_t staged;
} piece;

typedef struct { /* a part of one piece; bounds count from the start of the page that holds its first byte */
    int32_t slot, piece;
    int64_t from, to;
} block;

typedef struct {
    const colibri_scan *scans;
    int64_t parts[3]; /* a copy: the caller's may change as soon as the slot has landed */
    const colibri_packing *packings;
    int64_t base; /* where the slot starts */
    int32_t num_scans, num_pieces, num_packings;
    int32_t buffer; /* of staging: NO_BUFFER wanted, NEEDS_BUFFER not yet given */
    uint32_t crc, drives, used; /* sets of drives, bit d for drive d: that hold the record, that blocks came from */
    int8_t check, queue;
    int32_t next, previous; /* slots, -1 at an end */
    block rest;             /* of the piece that is being handed out: what nobody has taken */
    int32_t in_flight;      /* blocks taken and not finished */
    int64_t done_nbytes;    /* useful bytes of the blocks that are there */
    uint32_t sum;           /* their part in the checksum, see landing_sum */
    int64_t times[3];       /* submitted, begun, ended */
    colibri_failure failure; /* reason 0 while nothing has failed */
} job;

struct colibri_reader {
    uint8_t *arena;
    const int64_t *parts;
    int32_t *states;
    job *jobs;     /* [num_slots] */
    piece *pieces; /* [num_slots][max_pieces] */
    int32_t *fds, *direct; /* [num_drives][num_files] */
    int32_t num_slots, max_pieces, num_files, num_drives, num_threads, idle, closing, keep_cache;
    uint8_t *staging; /* buffers of staging_nbytes; the free ones are free_buffers[0 … num_free) */
    int64_t staging_nbytes;
    int32_t free_buffers[MAX_BUFFERS], num_free;
    int64_t block_nbytes; /* 0: pieces are read whole */
    int32_t first[COLIBRI_BACKGROUND + 1], last[COLIBRI_BACKGROUND + 1]; /* slots, -1 where a queue is empty */
    int64_t weights[COLIBRI_MAX_DRIVES], in_flight[COLIBRI_MAX_DRIVES], drive_bytes[COLIBRI_MAX_DRIVES];
    uint32_t dropped; /* mirrors that failed, a set */
    colibri_failure drops[COLIBRI_MAX_DRIVES];
    colibri_reader_stats stats;
    pthread_mutex_t mutex; /* guards queues, `idle`, `closing`, and of jobs `rest`, `in_flight`, `done_nbytes`,
                              `sum`, `used`, `failure` */
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
};

static inline const piece *pieces_of(const colibri_reader *r, int32_t slot) {
    return r->pieces + (int64_t)slot * r->max_pieces;
}

/* Bytes of the whole pages around a piece. */
static inline int64_t whole_pages(const piece *p) {
    return (p->offset % PAGE + p->nbytes + PAGE - 1) / PAGE * PAGE;
}

/* Bytes of a block that belong to its record. */
static inline int64_t useful_start(const piece *p, const block *b) {
    int64_t skip = p->offset % PAGE;
    return b->from > skip ? b->from : skip;
}

static inline int64_t useful_end(const piece *p, const block *b) {
    int64_t end = p->offset % PAGE + p->nbytes;
    return b->to < end ? b->to : end;
}

/* What the remainder of some bytes becomes when `nbytes` zeros follow. */
uint32_t crc32c_shift(uint32_t remainder, int64_t nbytes);

static inline void count(int64_t *counter, int64_t amount) {
    __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
}

/* Both return 0, or a reason with `failure` filled in. */
/* Reads a block, from another drive where the first fails; `drive` becomes the one that it came from. */
int landing_read(colibri_reader *r, const block *b, int32_t *drive, colibri_failure *failure);
/* What a block that is there adds, by exclusive or, to the checksum of its record. */
uint32_t landing_sum(const colibri_reader *r, const block *b);
/* Checks a record of which all blocks are there, and reads it again from each drive alone where it is wrong. */
int landing_check(colibri_reader *r, int32_t slot, colibri_failure *failure);

#endif
