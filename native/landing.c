/* How one record lands: block reads from whichever drive is free, then its checks. The twin of memory/landing.py.
 * Linux specifics: O_DIRECT and posix_fadvise. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#define MAX_RETRIES 1000 /* of one read that is interrupted or told to try again */

/* A file of one drive. */
typedef struct {
    int32_t *fd, *direct, drive, file;
} source;

static source source_of(colibri_reader *r, int32_t drive, int32_t file) {
    int32_t i = drive * r->num_files + file;
    return (source){.fd = &r->fds[i], .direct = &r->direct[i], .drive = drive, .file = file};
}

static int failed(colibri_failure *failure, int reason, int error, source s, int64_t offset) {
    *failure = (colibri_failure){
        .reason = reason, .error = error, .drive = s.drive, .file = s.file, .part = -1, .offset = offset};
    return reason;
}

/* ---- One block from one drive. */

static ssize_t pread_patiently(int fd, void *to, int64_t nbytes, int64_t offset) {
    for (int attempt = 0;; attempt++) {
        ssize_t got = pread(fd, to, (size_t)nbytes, offset);
        if (got >= 0 || (errno != EINTR && errno != EAGAIN) || attempt == MAX_RETRIES)
            return got;
        sched_yield();
    }
}

static int read_buffered(colibri_reader *r, source s, const piece *p, const block *b, colibri_failure *failure) {
    int64_t start = p->offset - p->offset % PAGE, first = useful_start(p, b), last = useful_end(p, b);
    for (int64_t done = first; done < last;) {
        ssize_t got = pread_patiently(*s.fd, p->memory + p->target + done, last - done, start + done);
        if (got < 0)
            return failed(failure, COLIBRI_READ_IO, errno, s, start + done);
        if (got == 0)
            return failed(failure, COLIBRI_READ_TRUNCATED, 0, s, start + done);
        count(&r->stats.reads, 1);
        done += got;
    }
#if defined(POSIX_FADV_DONTNEED)
    if (!r->keep_cache)
        posix_fadvise(*s.fd, start + b->from, b->to - b->from, POSIX_FADV_DONTNEED);
#endif
    return 0;
}

/* Whole pages. Returns -1 where this file does not take direct reads after all: it refuses them, or ends one short
 * of a page without being at its end. */
static int read_direct(colibri_reader *r, source s, const piece *p, const block *b, colibri_failure *failure) {
    int64_t start = p->offset - p->offset % PAGE, last = useful_end(p, b), done = b->from;
    while (done < last) {
        ssize_t got = pread_patiently(*s.fd, p->memory + p->target + done, b->to - done, start + done);
        if (got < 0 && errno == EINVAL)
            return -1;
        if (got < 0)
            return failed(failure, COLIBRI_READ_IO, errno, s, start + done);
        if (got == 0)
            return failed(failure, COLIBRI_READ_TRUNCATED, 0, s, start + done);
        count(&r->stats.reads, 1);
        done += got;
        if (done < last && done % PAGE)
            return -1;
    }
    count(&r->stats.slack_bytes, done - b->from - (last - useful_start(p, b)));
    return 0;
}

static int read_from(colibri_reader *r, source s, const piece *p, const block *b, colibri_failure *failure) {
#if defined(O_DIRECT)
    if (__atomic_load_n(s.direct, __ATOMIC_RELAXED)) {
        int reason = read_direct(r, s, p, b, failure);
        if (reason >= 0)
            return reason;
        /* Flags belong to the open file: reads of other threads turn buffered too, which is as good. */
        int flags = fcntl(*s.fd, F_GETFL);
        if (flags < 0 || fcntl(*s.fd, F_SETFL, flags & ~O_DIRECT) < 0)
            return failed(failure, COLIBRI_READ_IO, errno, s, p->offset);
        __atomic_store_n(s.direct, 0, __ATOMIC_RELAXED);
    }
#endif
    return read_buffered(r, s, p, b, failure);
}

/* ---- Which drive. */

static uint32_t living(colibri_reader *r, uint32_t drives) {
    return drives & ~__atomic_load_n(&r->dropped, __ATOMIC_ACQUIRE);
}

/* The drive of a set that would be done first, were its bandwidth shared by what it is reading; of equals, the one
 * that has given less. */
static int32_t soonest(colibri_reader *r, uint32_t drives, int64_t nbytes) {
    int32_t best = -1;
    double least = 0, least_given = 0;
    for (int32_t d = 0; d < r->num_drives; d++) {
        if (!(drives >> d & 1))
            continue;
        int64_t ahead = __atomic_load_n(&r->in_flight[d], __ATOMIC_RELAXED);
        double time = (double)(ahead + nbytes) / (double)r->weights[d];
        double given = (double)__atomic_load_n(&r->drive_bytes[d], __ATOMIC_RELAXED) / (double)r->weights[d];
        if (best < 0 || time < least || (time == least && given < least_given))
            best = d, least = time, least_given = given;
    }
    return best;
}

/* A mirror that failed is not read again; the model's own files always are. */
static void blame(colibri_reader *r, int32_t drive, const colibri_failure *failure) {
    uint32_t bit = 1u << drive;
    if (!drive)
        return;
    pthread_mutex_lock(&r->mutex);
    if (!(r->dropped & bit)) {
        r->drops[drive] = *failure;
        __atomic_store_n(&r->dropped, r->dropped | bit, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&r->mutex);
}

static int read_by(colibri_reader *r, int32_t drive, const block *b, colibri_failure *failure) {
    const piece *p = pieces_of(r, b->slot) + b->piece;
    int64_t nbytes = b->to - b->from;
    count(&r->in_flight[drive], nbytes);
    int reason = read_from(r, source_of(r, drive, p->file), p, b, failure);
    count(&r->in_flight[drive], -nbytes);
    if (reason)
        blame(r, drive, failure);
    else
        count(&r->drive_bytes[drive], useful_end(p, b) - useful_start(p, b));
    return reason;
}

int landing_read(colibri_reader *r, const block *b, int32_t *drive, colibri_failure *failure) {
    uint32_t left = living(r, r->jobs[b->slot].drives);
    int rescued = 0;
    for (;;) {
        colibri_failure found;
        *drive = soonest(r, left, b->to - b->from);
        int reason = read_by(r, *drive, b, &found);
        if (!reason) {
            count(&r->stats.rescued, rescued);
            return 0;
        }
        if (!rescued || !*drive) /* what is told is what became of the model's own file */
            *failure = found;
        rescued = 1;
        left = living(r, left & ~(1u << *drive));
        if (!left)
            return failure->reason;
    }
}

/* ---- Checks. */

static int not_finite(colibri_reader *r, int32_t slot, int64_t part, source first, colibri_failure *failure) {
    failed(failure, COLIBRI_READ_NOT_FINITE, 0, first, pieces_of(r, slot)->offset);
    failure->part = (int32_t)part;
    return COLIBRI_READ_NOT_FINITE;
}

static int pack_record(colibri_reader *r, int32_t slot, source first, colibri_failure *failure) {
    job *j = &r->jobs[slot];
    const uint8_t *pieces[MAX_PIECES];
    for (int32_t i = 0; i < j->num_pieces && i < MAX_PIECES; i++) {
        const piece *p = pieces_of(r, slot) + i;
        pieces[i] = p->memory + p->target + p->offset % PAGE;
    }
    for (const colibri_packing *p = j->packings; p < j->packings + j->num_packings; p++)
        if (colibri_pack(p, pieces, r->arena + (p->in_slot ? j->base : j->parts[p->part]) + p->to))
            return not_finite(r, slot, p->part, first, failure);
    return 0;
}

static int check_floats(colibri_reader *r, int32_t slot, source first, colibri_failure *failure) {
    job *j = &r->jobs[slot];
    for (const colibri_scan *s = j->scans; s < j->scans + j->num_scans; s++) {
        const uint8_t *data = r->arena + j->parts[s->part] + s->offset;
        if (!colibri_all_finite(data, s->nbytes, s->stride, s->count, s->kind))
            return not_finite(r, slot, s->part, first, failure);
    }
    return 0;
}

/* Blocks are summed by the threads that read them, in any order: as if zeros stood in place of all other bytes. */
uint32_t landing_sum(const colibri_reader *r, const block *b) {
    const job *j = &r->jobs[b->slot];
    const piece *p = pieces_of(r, b->slot) + b->piece, *last = pieces_of(r, b->slot) + j->num_pieces - 1;
    if (j->check != COLIBRI_CHECK_ALWAYS)
        return 0;
    const int64_t start = useful_start(p, b), end = useful_end(p, b);
    const int leads = b->piece == 0 && b->from == 0; /* the checksum of a record begins with ones */
    int64_t follow = p->offset % PAGE + p->nbytes - end;
    for (const piece *later = p + 1; later <= last; later++)
        follow += later->nbytes;
    return crc32c_shift(~colibri_crc32c(leads ? 0 : ~0u, p->memory + p->target + start, end - start), follow);
}

static uint32_t checksum(const colibri_reader *r, int32_t slot) {
    uint32_t crc = 0;
    for (const piece *p = pieces_of(r, slot); p < pieces_of(r, slot) + r->jobs[slot].num_pieces; p++)
        crc = colibri_crc32c(crc, p->memory + p->target + p->offset % PAGE, p->nbytes);
    return crc;
}

/* `in_blocks`: the record was read in blocks that were summed; what mirrors alone are suspected of was not. */
static int check(colibri_reader *r, int32_t slot, uint32_t used, int in_blocks, colibri_failure *failure) {
    job *j = &r->jobs[slot];
    const piece *first = pieces_of(r, slot);
    int32_t drive = used & 1 ? 0 : __builtin_ctz(used | 1u << 31);
    if (j->check == COLIBRI_CHECK_ALWAYS || (j->check == COLIBRI_CHECK_MIRRORS && used & ~1u)) {
        const int summed = in_blocks && j->check == COLIBRI_CHECK_ALWAYS;
        if ((summed ? ~j->sum : checksum(r, slot)) != j->crc)
            return failed(failure, COLIBRI_READ_CHECKSUM, 0, source_of(r, drive, first->file), first->offset);
    }
    const source whole = source_of(r, drive, first->file);
    int reason = pack_record(r, slot, whole, failure);
    return reason ? reason : check_floats(r, slot, whole, failure);
}

static int read_whole(colibri_reader *r, int32_t slot, int32_t drive, colibri_failure *failure) {
    const piece *first = pieces_of(r, slot);
    for (int32_t i = 0; i < r->jobs[slot].num_pieces; i++) {
        block all = {.slot = slot, .piece = i, .from = 0, .to = whole_pages(first + i)};
        int reason = read_by(r, drive, &all, failure);
        if (reason)
            return reason;
    }
    return check(r, slot, 1u << drive, 0, failure);
}

static void blame_all(colibri_reader *r, uint32_t drives, colibri_failure *failure) {
    for (int32_t d = 1; d < r->num_drives; d++)
        if (drives >> d & 1) {
            failure->drive = d;
            blame(r, d, failure);
        }
}

/* Which drive is wrong is known only where a record came from one alone: so each is asked for all of it, the model's
 * own files first. Mirrors that had a part in a wrong record are dropped where the model's own files are right. */
int landing_check(colibri_reader *r, int32_t slot, colibri_failure *failure) {
    uint32_t used = r->jobs[slot].used, drives = living(r, r->jobs[slot].drives);
    if (!check(r, slot, used, 1, failure))
        return 0;
    colibri_failure first = *failure;
    for (int32_t d = 0; d < r->num_drives; d++) {
        if (!(drives >> d & 1))
            continue;
        colibri_failure found = first; /* if only this drive had a part in it, it has just been asked */
        if (used != 1u << d && !read_whole(r, slot, d, &found)) {
            count(&r->stats.rescued, 1);
            if (!d)
                blame_all(r, used, &first);
            return 0;
        }
        blame(r, d, &found);
        if (!d)
            *failure = found;
        if (!d && found.reason == COLIBRI_READ_NOT_FINITE)
            break; /* copies would say the same */
    }
    return failure->reason;
}
