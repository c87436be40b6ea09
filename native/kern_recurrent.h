/* Recurrences over the rows of each sequence, whose state is a cell of float32: short convolutions and the delta rule.
   Channels, and columns of a head's state, do not depend on one another: each is one chain over its rows, in their order. */
#ifndef COLIBRI_KERN_RECURRENT_H
#define COLIBRI_KERN_RECURRENT_H

#include "kern_rows.h"

enum { MOST_KERNEL = 16, CONV_CHANNELS = 64 /* handed out at once */, MOST_KEY_DIM = 1024 };

#ifdef VEC_AVX512
enum { STATE_VECTORS = 8 /* columns that share a pass over the keys, in sixteens */ };
#else
enum { STATE_VECTORS = 4 };
#endif

static float *cell_of(const colibri_cell_layer *state, const colibri_cell_rows *rows, int64_t t) {
    return (float *)(void *)(state->pool + rows->cells[rows->members[t]] * state->cell_nbytes + state->offset);
}

/* The first row whose cell is not there or is too small for `floats`, or -1. */
static int32_t bad_cell(const colibri_cell_layer *state, const colibri_cell_rows *rows, int64_t floats) {
    const int64_t end = state->offset + 4 * floats, cells = state->cell_nbytes > 0 ? state->pool_nbytes / state->cell_nbytes : 0;
    for (int32_t t = 0; t < rows->rows; t++) {
        const int32_t member = rows->members[t];
        if (state->offset < 0 || state->offset % 4 || state->cell_nbytes % 4 || end > state->cell_nbytes) return t;
        if (member < 0 || member >= rows->num_members || rows->cells[member] < 0 || rows->cells[member] >= cells) return t;
    }
    return -1;
}

typedef struct {
    const colibri_short_conv *layer;
    const colibri_cell_layer *state;
    const colibri_cell_rows *rows;
    float *x;
    int64_t x_stride;
} conv_job;

static int64_t inputs_kept(const colibri_short_conv *layer) { return (int64_t)(layer->kernel - 1) * layer->dilation; }

/* out[c] = bias + sum over taps i, the oldest first, of weight[i][c] * input i [c]; the newest input is x. */
static void conv_taps(const colibri_short_conv *layer, float (*restrict weight)[CONV_CHANNELS], const float *restrict bias, const float *restrict past,
                      const float *restrict x, int64_t n, float *restrict out) {
    const int last = layer->kernel - 1;
    if (bias) memcpy(out, bias, (size_t)n * sizeof *out);
    else memset(out, 0, (size_t)n * sizeof *out);
    for (int i = 0; i < last; i++) {
        const float *restrict input = past + (int64_t)i * layer->dilation * layer->channels;
        for (int64_t c = 0; c < n; c++) out[c] = __builtin_fmaf(weight[i][c], input[c], out[c]);
    }
    for (int64_t c = 0; c < n; c++) out[c] = __builtin_fmaf(weight[last][c], x[c], out[c]);
}

/* weight[i][c] = from[c * K + i]; K is a constant where it is called. */
INLINE void turn_weights(int64_t K, const float *restrict from, int64_t n, float (*restrict weight)[CONV_CHANNELS]) {
    for (int64_t c = 0; c < n; c++) {
        for (int64_t i = 0; i < K; i++) weight[i][c] = from[c * K + i];
    }
}

static void conv_chunk(const conv_job *job, int64_t first, int64_t n) {
    const colibri_short_conv *layer = job->layer;
    const int64_t C = layer->channels, K = layer->kernel, kept = inputs_kept(layer);
    const size_t nbytes = (size_t)n * sizeof(float);
    float weight[MOST_KERNEL][CONV_CHANNELS], sum[CONV_CHANNELS], active[CONV_CHANNELS];
    const float *const out = layer->silu ? active : sum;
    if (K == 4) turn_weights(4, layer->weight + first * 4, n, weight);
    else turn_weights(K, layer->weight + first * K, n, weight);
    for (int64_t t = 0; t < job->rows->rows; t++) {
        float *x = job->x + t * job->x_stride + first, *past = cell_of(job->state, job->rows, t) + first;
        conv_taps(layer, weight, layer->bias ? layer->bias + first : NULL, past, x, n, sum);
        for (int64_t i = 0; i + 1 < kept; i++) memcpy(past + i * C, past + (i + 1) * C, nbytes);
        if (kept > 0) memcpy(past + (kept - 1) * C, x, nbytes);
        if (layer->silu) activate_row(COLIBRI_SILU_OF, sum, n, active);
        for (int64_t c = 0; c < n; c++) x[c] = layer->residual ? x[c] + out[c] : out[c];
    }
}

static void conv_chunks(void *arg, int64_t begin, int64_t end) {
    const conv_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i * CONV_CHANNELS, left = job->layer->channels - first;
        conv_chunk(job, first, left < CONV_CHANNELS ? left : CONV_CHANNELS);
    }
}

static int32_t conv_rows(colibri_context *ctx, const colibri_short_conv *layer, const colibri_cell_layer *state, const colibri_cell_rows *rows,
                         float *x, int64_t x_stride) {
    const conv_job job = {layer, state, rows, x, x_stride};
    if (layer->kernel < 1 || layer->kernel > MOST_KERNEL || layer->dilation < 1) return COLIBRI_ARGUMENT;
    if ((ctx->where = bad_cell(state, rows, inputs_kept(layer) * layer->channels)) >= 0) return COLIBRI_ARGUMENT;
    const int64_t chunks = (layer->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    pool_run(ctx->pool, conv_chunks, (void *)&job, chunks, pool_grain(ctx->pool, chunks, 8));
    return COLIBRI_OK;
}

typedef struct {
    const colibri_delta_rule *layer;
    const colibri_cell_layer *state;
    const colibri_cell_rows *rows;
    const float *q, *k, *v, *decay, *beta;
    int64_t q_stride, k_stride, v_stride, decay_stride, beta_stride;
    float *out;
} delta_job;

/* One row of one head: unit q and k, and a decay factor for each key channel. */
typedef struct {
    float q[MOST_KEY_DIM], k[MOST_KEY_DIM], decay[MOST_KEY_DIM], beta;
} delta_row;

static void unit_row(const float *x, int64_t n, float eps, float factor, float *out) {
    const float scale = factor / root_of_squares(x, n, 1.0f, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale;
}

static void take_delta_row(const delta_job *job, int64_t t, int64_t h, delta_row *row) {
    const colibri_delta_rule *layer = job->layer;
    const int64_t dk = layer->key_dim, key_head = h / (layer->heads / layer->key_heads);
    unit_row(job->q + t * job->q_stride + key_head * dk, dk, layer->eps, layer->scale, row->q);
    unit_row(job->k + t * job->k_stride + key_head * dk, dk, layer->eps, 1.0f, row->k);
    const float *decay = job->decay + t * job->decay_stride + h * layer->decay_width;
    for (int64_t i = 0; i < dk; i++) row->decay[i] = decay[layer->decay_width == 1 ? 0 : i];
    row->beta = job->beta[t * job->beta_stride + h];
}

/* N x 16 columns of a head's state: S = decay S; d = beta (v - k S); S += k d; out = q S. */
INLINE void delta_columns(int N, const delta_row *row, int64_t dk, int64_t dv, const float *v, float *S, float *out) {
    vf16 d[STATE_VECTORS], o[STATE_VECTORS];
    for (int n = 0; n < N; n++) d[n] = vf16_zero(), o[n] = vf16_zero();
    for (int64_t i = 0; i < dk; i++) {
        const vf16 k = vf16_set1(row->k[i]), decay = vf16_set1(row->decay[i]);
        for (int n = 0; n < N; n++) d[n] = vf16_fma(k, vf16_mul(decay, vf16_f32(S + i * dv + 16 * n)), d[n]);
    }
    for (int n = 0; n < N; n++) d[n] = vf16_mul(vf16_set1(row->beta), vf16_fma(vf16_set1(-1.0f), d[n], vf16_f32(v + 16 * n)));
    for (int64_t i = 0; i < dk; i++) {
        const vf16 k = vf16_set1(row->k[i]), q = vf16_set1(row->q[i]), decay = vf16_set1(row->decay[i]);
        for (int n = 0; n < N; n++) {
            const vf16 s = vf16_fma(k, d[n], vf16_mul(decay, vf16_f32(S + i * dv + 16 * n)));
            vf16_store(S + i * dv + 16 * n, s);
            o[n] = vf16_fma(q, s, o[n]);
        }
    }
    for (int n = 0; n < N; n++) vf16_store(out + 16 * n, o[n]);
}

/* The same for one column. */
static void delta_column(const delta_row *row, int64_t dk, int64_t dv, const float *v, float *S, float *out) {
    float d = 0.0f, o = 0.0f;
    for (int64_t i = 0; i < dk; i++) d = __builtin_fmaf(row->k[i], row->decay[i] * S[i * dv], d);
    d = row->beta * (*v - d);
    for (int64_t i = 0; i < dk; i++) {
        S[i * dv] = __builtin_fmaf(row->k[i], d, row->decay[i] * S[i * dv]);
        o = __builtin_fmaf(row->q[i], S[i * dv], o);
    }
    *out = o;
}

static void delta_head(const delta_job *job, int64_t h) {
    const colibri_delta_rule *layer = job->layer;
    const int64_t dk = layer->key_dim, dv = layer->value_dim, width = 16 * STATE_VECTORS;
    delta_row row;
    for (int64_t t = 0; t < job->rows->rows; t++) {
        take_delta_row(job, t, h, &row);
        const float *v = job->v + t * job->v_stride + h * dv;
        float *S = cell_of(job->state, job->rows, t) + h * dk * dv, *out = job->out + (t * layer->heads + h) * dv;
        int64_t at = 0;
        for (; at + width <= dv; at += width) delta_columns(STATE_VECTORS, &row, dk, dv, v + at, S + at, out + at);
        for (; at + 16 <= dv; at += 16) delta_columns(1, &row, dk, dv, v + at, S + at, out + at);
        for (; at < dv; at++) delta_column(&row, dk, dv, v + at, S + at, out + at);
    }
}

static void delta_heads(void *arg, int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; h++) delta_head(arg, h);
}

static int32_t delta_rows(colibri_context *ctx, const colibri_delta_rule *layer, const colibri_cell_layer *state, const colibri_cell_rows *rows,
                          const float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v, int64_t v_stride,
                          const float *decay, int64_t decay_stride, const float *beta, int64_t beta_stride, float *out) {
    delta_job job = {layer, state, rows, q, k, v, decay, beta, q_stride, k_stride, v_stride, decay_stride, beta_stride, out};
    const int64_t floats = (int64_t)layer->heads * layer->key_dim * layer->value_dim;
    if (layer->key_dim > MOST_KEY_DIM || layer->key_heads < 1 || layer->heads % layer->key_heads) return COLIBRI_ARGUMENT;
    if ((ctx->where = bad_cell(state, rows, floats)) >= 0) return COLIBRI_ARGUMENT;
    pool_run(ctx->pool, delta_heads, &job, layer->heads, 1);
    return COLIBRI_OK;
}

#endif
