/* The heart of latent attention: queries absorbed, the sum over latents, what is found expanded. All heads share one key a
   position: the latent, whose numbers are the value too, and the rotated rope key. */
#ifndef COLIBRI_KERN_LATENT_ATTEND_H
#define COLIBRI_KERN_LATENT_ATTEND_H

#include "kern_index.h"
#include "kern_lane_attend.h"

enum { ROWS_AT_ONCE = 64 /* whose absorbed queries are kept */ };

typedef struct {
    const colibri_latent *layer;
    const colibri_batch *batch;
    const colibri_latent_state *state;
    float *q_low;     /* [batch rows, q rank], or NULL */
    float *kv;        /* [batch rows, r + dr] latent and rope key */
    float *index_key; /* [batch rows, index head_dim] */
    float *q;         /* [rows, H (dn + dr)] */
    float *queries;   /* [rows, H, r + dr] absorbed; what attention finds, [r], takes their place */
    float *values;    /* [rows, H dv] */
    float *parts;     /* [LANE_PARTS, part_size] */
    int64_t first, rows; /* the rows at hand: q, queries and values hold these alone */
    int64_t r, key_width, q_width; /* of a head: r, r + dr, dn + dr */
} latent_job;

/* Columns [at, at + 16 C) of the queries of N rows: sums over the nope dims, ascending. */
INLINE void absorb_tile(int format, int N, int C, const uint8_t *w, int64_t r, int64_t dims, const float *const *q, float *const *out, int64_t at) {
    vf16 acc[4][4];
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) acc[n][c] = vf16_zero();
    }
    for (int64_t d = 0; d < dims; d++) {
        vf16 ws[4];
        for (int c = 0; c < C; c++) ws[c] = vf16_load(format, w + (d * r + at + 16 * c) * item_size(format));
        for (int n = 0; n < N; n++) {
            const vf16 value = vf16_set1(q[n][d]);
            for (int c = 0; c < C; c++) acc[n][c] = vf16_fma(value, ws[c], acc[n][c]);
        }
    }
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) vf16_store(out[n] + at + 16 * c, acc[n][c]);
    }
}

/* out += q[d] w[d] by ascending d < R, for the columns below `whole`. */
INLINE void absorb_few(int format, int R, const uint8_t *w, int64_t r, int64_t whole, const float *q, float *out) {
    vf16 values[4];
    for (int i = 0; i < R; i++) values[i] = vf16_set1(q[i]);
    for (int64_t c = 0; c < whole; c += 16) {
        vf16 acc = vf16_f32(out + c);
        for (int i = 0; i < R; i++) acc = vf16_fma(values[i], vf16_load(format, w + (i * r + c) * item_size(format)), acc);
        vf16_store(out + c, acc);
    }
}

/* The same for one row, four weights of each column at a time: the weights are read once, in their order. */
INLINE void absorb_row(int format, const uint8_t *w, int64_t r, int64_t dims, const float *q, float *out) {
    const int64_t whole = r / 16 * 16;
    int64_t d = 0;
    memset(out, 0, (size_t)whole * sizeof *out);
    for (; d + 4 <= dims; d += 4) absorb_few(format, 4, w + d * r * item_size(format), r, whole, q + d, out);
    for (; d < dims; d++) absorb_few(format, 1, w + d * r * item_size(format), r, whole, q + d, out);
}

INLINE void absorb_columns(int format, const uint8_t *w, int64_t r, int64_t dims, const float *q, float *out, int64_t at) {
    for (; at < r; at++) {
        float sum = 0.0f, weight[16];
        for (int64_t d = 0; d < dims; d++) {
            vf16_store(weight, vf16_head(format, w + (d * r + at) * item_size(format), 1));
            sum = __builtin_fmaf(q[d], weight[0], sum);
        }
        out[at] = sum;
    }
}

INLINE void absorb_of(int format, const uint8_t *w, int64_t r, int64_t dims, const float *const *q, float *const *out, int num) {
    for (int i = 0; i < num; i++) absorb_columns(format, w, r, dims, q[i], out[i], r / 16 * 16);
    int n = 0;
    for (; n + TILE_TOKENS <= num; n += TILE_TOKENS) {
        int64_t at = 0;
        for (; at + 16 * TILE_ROWS <= r; at += 16 * TILE_ROWS) absorb_tile(format, TILE_TOKENS, TILE_ROWS, w, r, dims, q + n, out + n, at);
        for (; at + 16 <= r; at += 16) absorb_tile(format, TILE_TOKENS, 1, w, r, dims, q + n, out + n, at);
    }
    for (; n < num; n++) absorb_row(format, w, r, dims, q[n], out[n]);
}

static const uint8_t *kv_b_rows(const colibri_latent *layer, int64_t row) {
    return layer->kv_b_proj.data + row * layer->kv_b_proj.columns * item_size(layer->kv_b_proj.format);
}

/* The queries of heads [begin, end), of all rows at hand. */
static void absorb_heads(void *arg, int64_t begin, int64_t end) {
    const latent_job *job = arg;
    const colibri_latent *layer = job->layer;
    const int64_t H = layer->num_heads, half = layer->rotary_dim / 2;
    for (int64_t h = begin; h < end; h++) {
        const uint8_t *w = kv_b_rows(layer, h * (layer->nope_dim + layer->value_dim));
        for (int64_t t = 0; t < job->rows; t += TOKENS) {
            const float *q[TOKENS];
            float *out[TOKENS];
            const int num = (int)(job->rows - t < TOKENS ? job->rows - t : TOKENS);
            for (int i = 0; i < num; i++) {
                const int64_t row = job->first + t + i;
                q[i] = job->q + ((t + i) * H + h) * job->q_width;
                out[i] = job->queries + ((t + i) * H + h) * job->key_width;
                memcpy(out[i] + job->r, q[i] + layer->nope_dim, (size_t)layer->rope_dim * sizeof *q[i]);
                rope_row(layer->rope_pairs, half, job->batch->cos + row * half, job->batch->sin + row * half, out[i] + job->r);
            }
            switch (layer->kv_b_proj.format) {
            case F32_CODE: absorb_of(F32_CODE, w, job->r, layer->nope_dim, q, out, num); break;
            case F16_CODE: absorb_of(F16_CODE, w, job->r, layer->nope_dim, q, out, num); break;
            default: absorb_of(BF16_CODE, w, job->r, layer->nope_dim, q, out, num); break;
            }
        }
    }
}

/* values = the value rows of kv_b_proj times what attention found, for heads [begin, end) of all rows at hand. */
static void expand_heads(void *arg, int64_t begin, int64_t end) {
    const latent_job *job = arg;
    const colibri_latent *layer = job->layer;
    const int64_t H = layer->num_heads, dn = layer->nope_dim, dv = layer->value_dim, stride = job->r * item_size(layer->kv_b_proj.format);
    for (int64_t h = begin; h < end; h++) {
        for (int64_t t = 0; t < job->rows; t += TOKENS) {
            const float *found[TOKENS];
            const int num = (int)(job->rows - t < TOKENS ? job->rows - t : TOKENS);
            for (int i = 0; i < num; i++) found[i] = job->queries + ((t + i) * H + h) * job->key_width;
            float_rows(layer->kv_b_proj.format, kv_b_rows(layer, h * (dn + dv) + dn), stride, (int)dv, found, num, job->r,
                       job->values + (t * H + h) * dv, H * dv);
        }
    }
}

/* Whether a row sees selected keys only, or the positions of selected entries and those behind the last entry. */
static inline int selects(const latent_job *job, int64_t row) {
    const int64_t top_k = job->layer->top_k;
    return top_k > 0 && entries_seen(job->batch->positions[row], job->layer->pool) > top_k;
}

/* Keys that a row of the batch sees. */
static int64_t latent_keys(const void *keys, int64_t row) {
    const latent_job *job = keys;
    const int64_t num = (int64_t)job->batch->positions[row] + 1, pool = job->layer->pool;
    return selects(job, row) ? job->layer->top_k * pool + num % pool : num;
}

/* The position of a row's key `rank`, ascending. */
static inline int64_t position_of(const latent_job *job, int64_t row, int64_t rank) {
    const int64_t top_k = job->layer->top_k, pool = job->layer->pool;
    if (!selects(job, row)) return rank;
    if (pool == 1) return job->state->selected[row * top_k + rank];
    if (rank < top_k * pool) return job->state->selected[row * top_k + rank / pool] * pool + rank % pool;
    return entries_seen(job->batch->positions[row], pool) * pool + rank - top_k * pool;
}

static void widen_latents(const void *keys, int64_t row, int64_t rank, int n, float *to) {
    const latent_job *job = keys;
    for (int j = 0; j < n; j++) {
        const int64_t position = position_of(job, row, rank + j);
        get_entry(&job->state->latent, job->batch, row, position, to + j * job->key_width);
        get_entry(&job->state->rope_key, job->batch, row, position, to + j * job->key_width + job->r);
    }
}

static void fetch_latents(const void *keys, int64_t row, int64_t rank, int n) {
    const latent_job *job = keys;
    for (int j = 0; j < n; j++) {
        const int64_t position = position_of(job, row, rank + j);
        fetch_entry(&job->state->latent, job->batch, row, position);
        fetch_entry(&job->state->rope_key, job->batch, row, position);
    }
}

static void attend_latents(colibri_context *ctx, const latent_job *job) {
    lane_job lanes = {.keys = job, .seen = latent_keys, .widen = widen_latents, .fetch = fetch_latents, .queries = job->queries, .parts = job->parts};
    lanes.heads = job->layer->num_heads, lanes.scale = job->layer->scale, lanes.value_width = job->r, lanes.key_width = job->key_width;
    lanes.first = job->first, lanes.rows = job->rows;
    attend_lanes(ctx, &lanes);
}

#endif
