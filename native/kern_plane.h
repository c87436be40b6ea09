/* Planes of the pool: one row of numbers for each position of a sequence, 64 to a block. */
#ifndef COLIBRI_KERN_PLANE_H
#define COLIBRI_KERN_PLANE_H

#include "kern_attend.h"

/* The block of the row's sequence that holds `position`. */
static uint8_t *plane_block(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t position) {
    const int32_t block = batch->block_tables[(int64_t)batch->members[row] * batch->table_width + position / BLOCK];
    return plane->pool + block * plane->block_nbytes + plane->offset;
}

static int64_t plane_nbytes(const colibri_plane *plane) {
    return BLOCK * ((int64_t)plane->width * item_size(plane->format) + (plane->format == INT8_ROWS_CODE ? 4 : 0));
}

static uint8_t *plane_scale(const colibri_plane *plane, uint8_t *block, int64_t position) {
    return block + BLOCK * (int64_t)plane->width + position % BLOCK * 4;
}

/* Rounds x [width] into its place. */
static void put_position(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t position, const float *x) {
    uint8_t *block = plane_block(plane, batch, row, position), *to = block + position % BLOCK * plane->width * item_size(plane->format);
    if (plane->format != INT8_ROWS_CODE) {
        narrow(plane->format, x, plane->width, to);
        return;
    }
    const float scale = narrow_row(x, plane->width, to);
    memcpy(plane_scale(plane, block, position), &scale, sizeof scale);
}

/* Widens what the row's sequence keeps of a position to x [width]. */
static void get_position(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t position, float *x) {
    uint8_t *block = plane_block(plane, batch, row, position);
    widen(plane->format, block + position % BLOCK * plane->width * item_size(plane->format), plane->width, x);
    if (plane->format == INT8_ROWS_CODE) {
        float scale;
        memcpy(&scale, plane_scale(plane, block, position), sizeof scale);
        for (int64_t i = 0; i < plane->width; i++) x[i] *= scale;
    }
}

/* Asks for a position that will be needed in a while. */
static void fetch_position(const colibri_plane *plane, const colibri_batch *batch, int64_t row, int64_t position) {
    const int64_t nbytes = (int64_t)plane->width * item_size(plane->format);
    fetch(plane_block(plane, batch, row, position) + position % BLOCK * nbytes, nbytes);
}

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
