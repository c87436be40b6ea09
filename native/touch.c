/* Touches slots ahead of the reader: the first touch of memory costs more than reading a record into it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "colibri.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14 */
#endif
#endif

#define PAGE 4096
#define STEP (2 << 20) /* bytes: what a huge page takes */
#define NICENESS 10    /* whoever computes goes first */

struct colibri_toucher {
    uint8_t *arena;
    const int64_t *bounds;
    const uint8_t *usable;
    uint8_t *touched;
    int32_t num_slots, holds, closing;
    pthread_mutex_t mutex; /* guards `closing`; held while a slot is being touched */
    pthread_cond_t wake;
    pthread_t thread;
};

/* Writes what stands there already, so it may be done while a record lands. */
static void touch_pages(uint8_t *start, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += PAGE) {
        uint8_t zero = 0;
        __atomic_compare_exchange_n(start + at, &zero, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

/* Returns 0, or an errno where the system has no memory. */
static int touch(uint8_t *start, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += STEP) {
        int64_t size = nbytes - at < STEP ? nbytes - at : STEP;
#if defined(__linux__)
        if (!madvise(start + at, (size_t)size, MADV_POPULATE_WRITE))
            continue;
        if (errno != EINVAL)
            return errno;
#endif
        touch_pages(start + at, size);
    }
    return 0;
}

static int32_t next_slot(const colibri_toucher *t, int32_t from) {
    for (int32_t slot = from; slot < t->num_slots; slot++)
        if (__atomic_load_n(&t->usable[slot], __ATOMIC_RELAXED) && !__atomic_load_n(&t->touched[slot], __ATOMIC_RELAXED))
            return slot;
    return -1;
}

static void *work(void *argument) {
    colibri_toucher *t = argument;
    int32_t from = 0;
#if defined(__linux__)
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICENESS); /* of this thread alone */
#endif
    pthread_mutex_lock(&t->mutex);
    while (!t->closing) {
        int32_t slot = __atomic_load_n(&t->holds, __ATOMIC_RELAXED) ? -1 : next_slot(t, from);
        if (slot < 0 && from) {
            from = 0;
            continue;
        }
        if (slot < 0) {
            pthread_cond_wait(&t->wake, &t->mutex);
            continue;
        }
        if (touch(t->arena + t->bounds[slot], t->bounds[slot + 1] - t->bounds[slot]))
            break; /* then records take what they need */
        __atomic_store_n(&t->touched[slot], 1, __ATOMIC_RELAXED);
        from = slot + 1;
        pthread_mutex_unlock(&t->mutex);
        pthread_mutex_lock(&t->mutex);
    }
    pthread_mutex_unlock(&t->mutex);
    return NULL;
}

colibri_toucher *colibri_toucher_create(uint8_t *arena, const int64_t *bounds, const uint8_t *usable, uint8_t *touched,
                                        int32_t num_slots) {
    colibri_toucher *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->arena = arena, t->bounds = bounds, t->usable = usable, t->touched = touched, t->num_slots = num_slots;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the caller's threads */
    int error = pthread_create(&t->thread, NULL, work, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        return t;
    free(t);
    errno = error;
    return NULL;
}

void colibri_toucher_hold(colibri_toucher *t) {
    __atomic_add_fetch(&t->holds, 1, __ATOMIC_RELAXED); /* first, or the thread might take the mutex again and again */
    pthread_mutex_lock(&t->mutex);
    pthread_mutex_unlock(&t->mutex);
}

void colibri_toucher_resume(colibri_toucher *t) {
    pthread_mutex_lock(&t->mutex);
    __atomic_sub_fetch(&t->holds, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&t->mutex);
    pthread_cond_signal(&t->wake);
}

void colibri_toucher_close(colibri_toucher *t) {
    pthread_mutex_lock(&t->mutex);
    t->closing = 1;
    pthread_mutex_unlock(&t->mutex);
    pthread_cond_signal(&t->wake);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}
