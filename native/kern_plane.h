/* Planes of the pool: rows of numbers, an entry for every `stride` positions of a sequence (one each, usually). */
#ifndef COLIBRI_KERN_PLANE_H
#define COLIBRI_KERN_PLANE_H

#include "kern_attend.h"

/* The last position of an entry, in whose block it lies. */
static inline int64_t entry_end(const colibri_plane *plane, int64_t entry) {
    return plane->stride == 1 ? entry : (entry + 1) * plane->stride - 1;
}

/* Its place in that block. */
static inline int64_t entry_place(const colibri_plane *plane, int64_t end) {
    return plane->stride == 1 ? end % BLOCK : end % BLOCK / plane->stride;
}

static int64_t entries_of_block(const colibri_plane *plane) { return plane->stride < BLOCK ? BLOCK / plane->stride : 1; }

/* The block of the row's sequence that holds `position`. */
static uint8_t *plane_block(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t position) {
    const int32_t block = batch->block_tables[(int64_t)batch->members[row] * batch->table_width + position / BLOCK];
    return plane->pool + block * plane->block_nbytes + plane->offset;
}

static int64_t plane_nbytes(const colibri_plane *plane) {
    return entries_of_block(plane) * ((int64_t)plane->width * item_size(plane->format) + (plane->format == INT8_ROWS_CODE ? 4 : 0));
}

static uint8_t *plane_scale(const colibri_plane *plane, uint8_t *block, int64_t place) {
    return block + entries_of_block(plane) * plane->width + place * 4;
}

/* Rounds x [width] to items, and int8 its scale. */
static void put_row(int format, int64_t width, const float *x, uint8_t *items, uint8_t *scale_at) {
    if (format != INT8_ROWS_CODE) {
        narrow(format, x, width, items);
        return;
    }
    const float scale = narrow_row(x, width, items);
    memcpy(scale_at, &scale, sizeof scale);
}

/* Widens items to x [width]. */
static void get_row(int format, int64_t width, const uint8_t *items, const uint8_t *scale_at, float *x) {
    widen(format, items, width, x);
    if (format == INT8_ROWS_CODE) {
        float scale;
        memcpy(&scale, scale_at, sizeof scale);
        for (int64_t i = 0; i < width; i++) x[i] *= scale;
    }
}

/* Rounds x [width] into its place. */
static void put_entry(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t entry, const float *x) {
    const int64_t end = entry_end(plane, entry), place = entry_place(plane, end);
    uint8_t *block = plane_block(plane, batch, row, end);
    put_row(plane->format, plane->width, x, block + place * plane->width * item_size(plane->format), plane_scale(plane, block, place));
}

/* Widens what the row's sequence keeps as an entry to x [width]. */
static void get_entry(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t entry, float *x) {
    const int64_t end = entry_end(plane, entry), place = entry_place(plane, end);
    uint8_t *block = plane_block(plane, batch, row, end);
    get_row(plane->format, plane->width, block + place * plane->width * item_size(plane->format), plane_scale(plane, block, place), x);
}

/* Asks for an entry that will be needed in a while. */
static void fetch_entry(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t entry) {
    const int64_t nbytes = (int64_t)plane->width * item_size(plane->format), end = entry_end(plane, entry);
    fetch(plane_block(plane, batch, row, end) + entry_place(plane, end) * nbytes, nbytes);
}

/* Entries that a row sees: those that are complete. */
static inline int64_t entries_seen(int64_t position, int64_t stride) { return stride == 1 ? position + 1 : (position + 1) / stride; }

/* The first row whose sequence or blocks are out of range, or -1. */
static int32_t bad_plane_row(const colibri_plane *plane, const colibri_batch *b) {
    const int64_t last = plane->pool_nbytes - plane->offset - plane_nbytes(plane);
    for (int32_t t = 0; t < b->rows; t++) {
        if (b->members[t] < 0 || b->members[t] >= b->num_members || b->positions[t] < 0) return t;
        if (b->positions[t] / BLOCK >= b->table_width) return t;
        const int32_t *table = b->block_tables + (int64_t)b->members[t] * b->table_width;
        for (int64_t i = 0; i <= b->positions[t] / BLOCK; i++) {
            if (table[i] < 0 || table[i] * plane->block_nbytes > last) return t;
        }
    }
    return -1;
}

#endif
