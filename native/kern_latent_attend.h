/* The heart of latent attention: queries absorbed, the sum over latents, what is found expanded. All heads share one key a
   position: the latent, whose numbers are the value too, and the rotated rope key. */
#ifndef COLIBRI_KERN_LATENT_ATTEND_H
#define COLIBRI_KERN_LATENT_ATTEND_H

#include "kern_index.h"

enum { MOST_LATENT = 512, MOST_ROPE_DIM = 128, MOST_KEY = MOST_LATENT + MOST_ROPE_DIM };
enum { ROWS_AT_ONCE = 64 /* whose absorbed queries are kept */, LATENT_PARTS = 96 /* splits that wait to be combined */ };

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
    float *parts;     /* [LATENT_PARTS, part_size] */
    int64_t first, rows; /* the rows at hand: q, queries and values hold these alone */
    int64_t r, key_width, q_width; /* of a head: r, r + dr, dn + dr */
    int64_t lanes;    /* heads in a group: 16 or 32 */
    int64_t groups;   /* of a row */
    int64_t first_split, num_splits;
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

/* Keys that a row of the batch sees. */
static int64_t keys_seen(const latent_job *job, int64_t row) {
    const int64_t num = (int64_t)job->batch->positions[row] + 1, top_k = job->layer->top_k;
    return top_k > 0 && num > top_k ? top_k : num;
}

/* The position of a row's key `rank`, ascending. */
static inline int64_t position_of(const latent_job *job, int64_t row, int64_t rank) {
    const int64_t top_k = job->layer->top_k;
    return top_k > 0 && job->batch->positions[row] >= top_k ? job->state->selected[row * top_k + rank] : rank;
}

typedef struct {
    _Alignas(64) float q[MOST_KEY * LANES], keys[BLOCK * MOST_KEY], p[BLOCK * LANES], o[2][MOST_LATENT * LANES];
} latent_scratch;

/* A group of heads of one row. */
typedef struct {
    int64_t row, rank_end; /* the row in the batch, and how many keys it sees */
    int heads, vectors;
    float *queries; /* of its first head */
} lane_group;

static lane_group group_of(const latent_job *job, int64_t i) {
    const int64_t t = i / job->groups, head = i % job->groups * job->lanes, left = job->layer->num_heads - head;
    lane_group g = {.row = job->first + t, .heads = (int)(left < job->lanes ? left : job->lanes)};
    g.rank_end = keys_seen(job, g.row), g.vectors = g.heads > 16 ? 2 : 1;
    g.queries = job->queries + (t * job->layer->num_heads + head) * job->key_width;
    return g;
}

static void widen_keys(const latent_job *job, int64_t row, int64_t rank, int n, float *keys) {
    for (int j = 0; j < n; j++) {
        const int64_t position = position_of(job, row, rank + j);
        get_position(&job->state->latent, job->batch, row, position, keys + j * job->key_width);
        get_position(&job->state->rope_key, job->batch, row, position, keys + j * job->key_width + job->r);
    }
}

static void fetch_keys(const latent_job *job, int64_t row, int64_t rank, int n) {
    for (int j = 0; j < n; j++) {
        const int64_t position = position_of(job, row, rank + j);
        fetch_position(&job->state->latent, job->batch, row, position);
        fetch_position(&job->state->rope_key, job->batch, row, position);
    }
}

/* What one split holds for a group, whose queries lie in m->q. */
static void latent_split(const latent_job *job, const lane_group *g, int64_t split, latent_scratch *m, softmaxes *s) {
    const int64_t end = split * SPLIT + SPLIT < g->rank_end ? split * SPLIT + SPLIT : g->rank_end;
    begin_softmaxes(s, job->r);
    for (int64_t rank = split * SPLIT; rank < end; rank += BLOCK) {
        const int n = (int)(end - rank < BLOCK ? end - rank : BLOCK), next = (int)(end - rank - n < BLOCK ? end - rank - n : BLOCK);
        widen_keys(job, g->row, rank, n, m->keys);
        fetch_keys(job, g->row, rank + n, next);
        attend_keys(g->vectors, job->layer->scale, m->keys, n, job->key_width, job->r, m->q, m->p, s);
    }
}

/* All splits of groups [begin, end), one after the other. */
static void attend_groups(void *arg, int64_t begin, int64_t end) {
    const latent_job *job = arg;
    latent_scratch m;
    for (int64_t i = begin; i < end; i++) {
        const lane_group g = group_of(job, i);
        softmaxes all = {.o = m.o[0]}, next = {.o = m.o[1]};
        fill_lanes(g.queries, job->key_width, g.heads, job->key_width, m.q);
        latent_split(job, &g, 0, &m, &all);
        for (int64_t split = 1; split * SPLIT < g.rank_end; split++) {
            latent_split(job, &g, split, &m, &next);
            combine_lanes(&all, &next, job->r);
        }
        finish_lanes(&all, g.heads, job->r, g.queries, job->key_width);
    }
}

/* Few rows and many keys: splits of every group are one loop. A group has num_splits + 1 parts; the last is all before. */
static int64_t part_size(int64_t r) { return (r + 2) * LANES; }

static float *latent_part(const latent_job *job, int64_t group, int64_t number) {
    return job->parts + (group * (job->num_splits + 1) + number) * part_size(job->r);
}

static softmaxes load_part(const latent_job *job, float *part) {
    softmaxes s = {.o = part};
    memcpy(s.max, part + job->r * LANES, sizeof s.max);
    memcpy(s.sum, part + job->r * LANES + LANES, sizeof s.sum);
    return s;
}

static void store_part(const latent_job *job, const softmaxes *s) {
    memcpy(s->o + job->r * LANES, s->max, sizeof s->max);
    memcpy(s->o + job->r * LANES + LANES, s->sum, sizeof s->sum);
}

static void attend_latent_parts(void *arg, int64_t begin, int64_t end) {
    const latent_job *job = arg;
    latent_scratch m;
    for (int64_t i = begin; i < end; i++) {
        const lane_group g = group_of(job, i / job->num_splits);
        const int64_t number = i % job->num_splits, split = job->first_split + number;
        softmaxes s = {.o = latent_part(job, i / job->num_splits, number)};
        if (split * SPLIT >= g.rank_end) continue;
        fill_lanes(g.queries, job->key_width, g.heads, job->key_width, m.q);
        latent_split(job, &g, split, &m, &s);
        store_part(job, &s);
    }
}

static void combine_latent_parts(void *arg, int64_t begin, int64_t end) {
    const latent_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        const lane_group g = group_of(job, i);
        const int64_t last = (g.rank_end - 1) / SPLIT;
        float *before = latent_part(job, i, job->num_splits);
        softmaxes all = load_part(job, before);
        for (int64_t split = job->first_split; split < job->first_split + job->num_splits && split <= last; split++) {
            const softmaxes next = load_part(job, latent_part(job, i, split - job->first_split));
            if (split > 0) {
                combine_lanes(&all, &next, job->r);
                continue;
            }
            memcpy(all.max, next.max, sizeof all.max), memcpy(all.sum, next.sum, sizeof all.sum);
            memcpy(all.o, next.o, (size_t)(job->r * LANES) * sizeof *all.o);
        }
        store_part(job, &all);
        if (last >= job->first_split && last < job->first_split + job->num_splits) {
            finish_lanes(&all, g.heads, job->r, g.queries, job->key_width);
        }
    }
}

static void attend_latents(colibri_context *ctx, latent_job *job) {
    const int64_t threads = pool_threads(ctx->pool), H = job->layer->num_heads;
    int64_t splits = 1;
    for (int64_t t = job->first; t < job->first + job->rows; t++) {
        const int64_t num = (keys_seen(job, t) + SPLIT - 1) / SPLIT;
        splits = num > splits ? num : splits;
    }
    job->lanes = job->rows * ((H + LANES - 1) / LANES) * splits < threads ? 16 : LANES;
    job->groups = (H + job->lanes - 1) / job->lanes;
    const int64_t groups = job->rows * job->groups, most = LATENT_PARTS / groups - 1;
    if (threads == 1 || splits == 1 || groups >= 8 * threads || most < 2) {
        pool_run(ctx->pool, attend_groups, job, groups, 1);
        return;
    }
    job->num_splits = splits < most ? splits : most;
    for (job->first_split = 0; job->first_split < splits; job->first_split += job->num_splits) {
        pool_run(ctx->pool, attend_latent_parts, job, groups * job->num_splits, 1);
        pool_run(ctx->pool, combine_latent_parts, job, groups, 1);
    }
}

#endif
