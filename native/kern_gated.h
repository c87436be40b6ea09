/* Streams that are read and written through gates: elementwise work on rows of n streams. */
#ifndef COLIBRI_KERN_GATED_H
#define COLIBRI_KERN_GATED_H

#include "kern_rows.h"

typedef struct {
    const float *x, *other; /* [rows, n width]; gates, another row of streams, or y [rows, width] */
    const float *weights;   /* [rows, n] */
    float *out;
    int64_t streams, width;
} gated_job;

static void read_gated_rows(void *arg, int64_t begin, int64_t end) {
    const gated_job *job = arg;
    const int64_t n = job->streams, D = job->width;
    for (int64_t t = begin; t < end; t++) {
        float *restrict out = job->out + t * D;
        memset(out, 0, (size_t)D * sizeof *out);
        for (int64_t i = t * n; i < (t + 1) * n; i++) {
            const float *restrict x = job->x + i * D, *restrict gate = job->other + i * D;
            for (int64_t d = 0; d < D; d++) out[d] = __builtin_fmaf(sigmoid(gate[d]), x[d], out[d]);
        }
        for (int64_t d = 0; d < D; d++) out[d] /= (float)n;
    }
}

static int32_t read_gated(colibri_context *ctx, const float *x, const float *gate, int32_t num_streams, int32_t width, int32_t rows, float *out) {
    gated_job job = {.x = x, .other = gate, .out = out, .streams = num_streams, .width = width};
    pool_run(ctx->pool, read_gated_rows, &job, rows, 1);
    return COLIBRI_OK;
}

static void write_gated_rows(void *arg, int64_t begin, int64_t end) {
    const gated_job *job = arg;
    const int64_t n = job->streams, D = job->width;
    for (int64_t t = begin; t < end; t++) {
        const float *restrict y = job->other + t * D;
        for (int64_t i = t * n; i < (t + 1) * n; i++) {
            float *restrict x = job->out + i * D;
            const float weight = job->weights[i];
            for (int64_t d = 0; d < D; d++) x[d] = __builtin_fmaf(weight, y[d], x[d]);
        }
    }
}

static int32_t write_gated(colibri_context *ctx, const float *weights, const float *y, int32_t num_streams, int32_t width, int32_t rows, float *x) {
    gated_job job = {.other = y, .weights = weights, .out = x, .streams = num_streams, .width = width};
    pool_run(ctx->pool, write_gated_rows, &job, rows, 1);
    return COLIBRI_OK;
}

static void match_rows(void *arg, int64_t begin, int64_t end) {
    const gated_job *job = arg;
    const int64_t n = job->streams, D = job->width;
    for (int64_t i = begin * n; i < end * n; i++) {
        const float *const rows[1] = {job->other + i * D};
        float_tile(F32_CODE, 1, 1, (const uint8_t *)(job->x + i * D), 0, rows, D, job->out + i, 1);
    }
}

static int32_t match_streams(colibri_context *ctx, const float *x, const float *y, int32_t num_streams, int32_t width, int32_t rows, float *out) {
    gated_job job = {.x = x, .other = y, .out = out, .streams = num_streams, .width = width};
    pool_run(ctx->pool, match_rows, &job, rows, 1);
    return COLIBRI_OK;
}

#endif
