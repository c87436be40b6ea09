/* Residual streams that are read and written by weights of each row (hyper-connections). */
#ifndef COLIBRI_KERN_STREAMS_H
#define COLIBRI_KERN_STREAMS_H

#include "kern_rows.h"

enum { MOST_STREAMS = 16, STREAM_COLUMNS = 1024 /* handed out at once */ };

typedef struct {
    const colibri_stream_mix *mix;
    const float *weights, *x; /* [rows, fn.rows], [rows, n D] */
    float *logits;            /* the same as weights, which they become */
    float *out;               /* [rows, D] */
    const float *y;
    float *streams;           /* x, writable */
    int64_t width, chunks;    /* D, and the parts that a row is divided into */
} streams_job;

/* Divides each row (step 1), or each column (step n), of M [n, n] by its sum + eps; sums ascend. */
static void make_sums_one(float *m, int64_t n, int64_t apart, int64_t step, float eps) {
    for (int64_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int64_t j = 0; j < n; j++) sum += m[i * apart + j * step];
        for (int64_t j = 0; j < n; j++) m[i * apart + j * step] /= sum + eps;
    }
}

/* Scores M [n, n] become the mixing matrix. */
static void make_mixing(const colibri_stream_mix *mix, float *m) {
    const int64_t n = mix->num_streams;
    for (int64_t i = 0; i < n; i++) {
        float max = m[i * n], sum = 0.0f;
        for (int64_t j = 0; j < n; j++) max = m[i * n + j] > max ? m[i * n + j] : max;
        for (int64_t j = 0; j < n; j++) {
            m[i * n + j] = exp_f32(m[i * n + j] - max);
            sum += m[i * n + j];
        }
        for (int64_t j = 0; j < n; j++) m[i * n + j] = m[i * n + j] / sum + mix->eps;
    }
    make_sums_one(m, n, 1, n, mix->eps);
    for (int32_t k = 1; k < mix->iterations; k++) {
        make_sums_one(m, n, n, 1, mix->eps);
        make_sums_one(m, n, 1, n, mix->eps);
    }
}

/* Products with fn become weights. */
static void weigh_stream_rows(void *arg, int64_t begin, int64_t end) {
    const streams_job *job = arg;
    const colibri_stream_mix *mix = job->mix;
    const int64_t n = mix->num_streams, all = n * job->width, num = mix->fn.rows;
    for (int64_t t = begin; t < end; t++) {
        const float size = 1.0f / root_mean_square(job->x + t * all, all, mix->norm_eps);
        float *w = job->logits + t * num;
        for (int64_t i = 0; i < num; i++) w[i] = __builtin_fmaf(w[i] * size, mix->scale[i < n ? 0 : i < 2 * n ? 1 : 2], mix->base[i]);
        for (int64_t i = 0; i < n; i++) w[i] = sigmoid(w[i]) + mix->eps;
        if (num == n) continue;
        for (int64_t i = n; i < 2 * n; i++) w[i] = 2.0f * sigmoid(w[i]);
        make_mixing(mix, w + 2 * n);
    }
}

/* Columns of a row that belong to chunk i of all. */
static int64_t stream_chunk(const streams_job *job, int64_t i, int64_t *row, int64_t *first) {
    *row = i / job->chunks, *first = i % job->chunks * STREAM_COLUMNS;
    const int64_t left = job->width - *first;
    return left < STREAM_COLUMNS ? left : STREAM_COLUMNS;
}

/* out = sum_i pre_i x_i, ascending. */
static void sum_streams(void *arg, int64_t begin, int64_t end) {
    const streams_job *job = arg;
    const int64_t n = job->mix->num_streams, D = job->width;
    for (int64_t i = begin; i < end; i++) {
        int64_t t, first;
        const int64_t num = stream_chunk(job, i, &t, &first);
        const float *w = job->weights + t * job->mix->fn.rows, *x = job->x + t * n * D + first;
        float *restrict out = job->out + t * D + first;
        for (int64_t c = 0; c < num; c++) out[c] = w[0] * x[c];
        for (int64_t s = 1; s < n; s++) {
            for (int64_t c = 0; c < num; c++) out[c] = __builtin_fmaf(w[s], x[s * D + c], out[c]);
        }
    }
}

/* Sixteen columns of all streams at once, which are read before they are written. */
static void mix_columns(int64_t n, const float *post, const float *m, const float *y, int64_t D, int64_t num, float *x) {
    vf16 old[MOST_STREAMS];
    const vf16 added = vf16_head(F32_CODE, y, (int)num);
    for (int64_t i = 0; i < n; i++) old[i] = vf16_head(F32_CODE, x + i * D, (int)num);
    for (int64_t j = 0; j < n; j++) {
        vf16 sum = vf16_mul(vf16_set1(post[j]), added);
        for (int64_t i = 0; i < n; i++) sum = vf16_fma(vf16_set1(m[i * n + j]), old[i], sum);
        float out[16];
        vf16_store(out, sum);
        memcpy(x + j * D, out, (size_t)num * sizeof *x);
    }
}

/* x_j = post_j y + sum_i M_ij x_i: the product first, then i ascending. */
static void mix_streams(void *arg, int64_t begin, int64_t end) {
    const streams_job *job = arg;
    const int64_t n = job->mix->num_streams, D = job->width;
    for (int64_t i = begin; i < end; i++) {
        int64_t t, first;
        const int64_t num = stream_chunk(job, i, &t, &first);
        const float *w = job->weights + t * job->mix->fn.rows;
        for (int64_t c = first; c < first + num; c += 16) {
            const int64_t left = first + num - c;
            mix_columns(n, w + n, w + 2 * n, job->y + t * D + c, D, left < 16 ? left : 16, job->streams + t * n * D + c);
        }
    }
}

static int32_t read_streams(colibri_context *ctx, const colibri_stream_mix *mix, const float *x, int32_t rows, float *weights, float *out) {
    const int64_t n = mix->num_streams, D = n > 0 ? mix->fn.columns / n : 0;
    if (n < 1 || n > MOST_STREAMS || D * n != mix->fn.columns || (mix->fn.rows != n && mix->fn.rows != n * (n + 2))) return COLIBRI_ARGUMENT;
    streams_job job = {.mix = mix, .weights = weights, .x = x, .logits = weights, .out = out, .width = D};
    job.chunks = (D + STREAM_COLUMNS - 1) / STREAM_COLUMNS;
    const int32_t code = matmul(ctx, &mix->fn, x, rows, weights);
    if (code != COLIBRI_OK) return code;
    pool_run(ctx->pool, weigh_stream_rows, &job, rows, 1);
    pool_run(ctx->pool, sum_streams, &job, rows * job.chunks, 4);
    return COLIBRI_OK;
}

static int32_t write_streams(colibri_context *ctx, const colibri_stream_mix *mix, const float *weights, const float *y, int32_t rows,
                             int32_t width, float *x) {
    const int64_t n = mix->num_streams;
    if (n < 1 || n > MOST_STREAMS || (int64_t)width * n != mix->fn.columns || mix->fn.rows != n * (n + 2)) return COLIBRI_ARGUMENT;
    streams_job job = {.mix = mix, .weights = weights, .y = y, .streams = x, .width = width};
    job.chunks = (width + STREAM_COLUMNS - 1) / STREAM_COLUMNS;
    pool_run(ctx->pool, mix_streams, &job, rows * job.chunks, 4);
    return COLIBRI_OK;
}

#endif
