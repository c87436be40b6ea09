/* Entries that several positions share: sums that are carried over the rows of a sequence, channel by channel. */
#ifndef COLIBRI_KERN_POOLING_H
#define COLIBRI_KERN_POOLING_H

#include "kern_plane.h"
#include "kern_recurrent.h"

enum { POOL_CHANNELS = 64 /* handed out at once */ };

typedef struct {
    const colibri_pooling *layer;
    const colibri_cell_layer *state;
    const colibri_cell_rows *rows;
    const colibri_batch *batch;
    const colibri_plane *plane;
    float *values;
    const float *gates;
    int64_t columns;
} pool_rows_job;

/* One position more in a softmax: the largest score, the sum of weights, and that of weighted values. A sum of zero says that it
   is the first. */
static void take_in(const float *restrict value, const float *restrict gate, const float *restrict bias, int64_t n, float *restrict most,
                    float *restrict weight, float *restrict total) {
    for (int64_t c = 0; c < n; c++) {
        const float score = gate[c] + bias[c], before = weight[c] == 0.0f ? score : most[c], now = score > before ? score : before;
        const float keep = exp_f32(before - now), share = exp_f32(score - now);
        most[c] = now;
        weight[c] = __builtin_fmaf(weight[c], keep, share);
        total[c] = __builtin_fmaf(share, value[c], total[c] * keep);
    }
}

/* Channels [first, first + n) of all rows; a complete entry takes the place of the row's first values. */
static void pool_chunk(const pool_rows_job *job, int64_t first, int64_t n) {
    const colibri_pooling *layer = job->layer;
    const int64_t W = layer->width, m = layer->stride, part = 3 * W, parts = layer->overlap ? 2 : 1;
    const size_t nbytes = (size_t)n * sizeof(float);
    for (int64_t t = 0; t < job->batch->rows; t++) {
        const int64_t place = job->batch->positions[t] % m;
        float *next = cell_of(job->state, job->rows, t) + first, *now = next + (parts - 1) * part;
        float *values = job->values + t * job->columns + first;
        const float *gates = job->gates + t * job->columns + first, *bias = layer->bias + place * job->columns + first;
        for (int k = 0; k < 3 && place == 0; k++) {
            if (layer->overlap) memcpy(now + k * W, next + k * W, nbytes);
            memset(next + k * W, 0, nbytes);
        }
        if (layer->overlap) take_in(values, gates, bias, n, next, next + W, next + 2 * W);
        const int64_t own = (parts - 1) * W;
        take_in(values + own, gates + own, bias + own, n, now, now + W, now + 2 * W);
        for (int64_t c = 0; c < n && place == m - 1; c++) values[c] = now[2 * W + c] / now[W + c];
    }
}

static void pool_chunks(void *arg, int64_t begin, int64_t end) {
    const pool_rows_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i * POOL_CHANNELS, left = job->layer->width - first;
        pool_chunk(job, first, left < POOL_CHANNELS ? left : POOL_CHANNELS);
    }
}

/* Entries become final and are rounded into the pool. */
static void keep_entries(void *arg, int64_t begin, int64_t end) {
    const pool_rows_job *job = arg;
    const colibri_pooling *layer = job->layer;
    const int64_t half = layer->rotary_dim / 2;
    for (int64_t t = begin; t < end; t++) {
        const int64_t position = job->batch->positions[t];
        float *x = job->values + t * job->columns;
        if ((position + 1) % layer->stride) continue;
        if (layer->norm.weight) rms_norm(x, layer->norm.weight, layer->norm.eps, layer->width, x);
        if (half) rope_row(1, half, job->batch->cos + t * half, job->batch->sin + t * half, x + layer->width - layer->rotary_dim);
        put_entry(job->plane, job->batch, t, position / layer->stride, x);
    }
}

static int32_t pool_rows(colibri_context *ctx, const colibri_pooling *layer, const colibri_cell_layer *state, const colibri_cell_rows *rows,
                         const colibri_batch *batch, const colibri_plane *plane, float *values, const float *gates) {
    const int64_t parts = layer->overlap ? 2 : 1;
    pool_rows_job job = {layer, state, rows, batch, plane, values, gates, parts * layer->width};
    if (rows->rows != batch->rows || layer->stride != plane->stride || layer->width != plane->width) return COLIBRI_ARGUMENT;
    if ((ctx->where = bad_cell(state, rows, parts * 3 * layer->width)) >= 0) return COLIBRI_ARGUMENT;
    if ((ctx->where = bad_plane_row(plane, batch)) >= 0) return COLIBRI_ARGUMENT;
    pool_run(ctx->pool, pool_chunks, &job, (layer->width + POOL_CHANNELS - 1) / POOL_CHANNELS, 1);
    pool_run(ctx->pool, keep_entries, &job, batch->rows, 16);
    return COLIBRI_OK;
}

#endif
