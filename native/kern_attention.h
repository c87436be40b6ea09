/* Attention of one layer: projections, rope, the K/V pool, and the sum over keys. */
#ifndef COLIBRI_KERN_ATTENTION_H
#define COLIBRI_KERN_ATTENTION_H

#include "kern_linear.h"

enum { BLOCK = 64, SPLIT = 1024, MOST_HEAD_DIM = 1024 };

typedef struct {
    const colibri_attention *layer;
    const colibri_batch *batch;
    const colibri_kv *kv;
    float *q, *k, *v; /* [rows, H hd], [rows, K hd], [rows, K hd] */
    float *mixed;     /* [rows, H hd] what attention found */
    const input *in;  /* the same, coded for o_proj */
    int64_t heads_at_once;
} attention_job;

/* Where position `position` of the row's sequence lies: K of K/V head 0. V follows K [heads, 64, hd]. */
static uint8_t *key_of(const attention_job *job, int64_t row, int64_t position) {
    const colibri_batch *batch = job->batch;
    const int32_t block = batch->block_tables[(int64_t)batch->members[row] * batch->table_width + position / BLOCK];
    return job->kv->pool + block * job->kv->block_nbytes + job->kv->offset;
}

static int64_t head_nbytes(const attention_job *job) { return (int64_t)BLOCK * job->layer->head_dim * item_size(job->kv->format); }

/* First position that the row sees. */
static int64_t first_key(const attention_job *job, int64_t row) {
    const int64_t first = (int64_t)job->batch->positions[row] - job->layer->window + 1;
    return job->layer->window > 0 && first > 0 ? first : 0;
}

/* The first row whose sequence or blocks are out of range, or -1. */
static int32_t bad_row(const attention_job *job) {
    const colibri_batch *b = job->batch;
    const int64_t layer_nbytes = 2 * job->layer->num_kv_heads * head_nbytes(job);
    for (int32_t t = 0; t < b->rows; t++) {
        if (b->members[t] < 0 || b->members[t] >= b->num_members || b->positions[t] < 0) return t;
        if (b->positions[t] / BLOCK >= b->table_width) return t;
        const int32_t *table = b->block_tables + (int64_t)b->members[t] * b->table_width;
        for (int64_t i = first_key(job, t) / BLOCK; i <= b->positions[t] / BLOCK; i++) {
            if (table[i] < 0 || table[i] * job->kv->block_nbytes + job->kv->offset + layer_nbytes > job->kv->pool_nbytes) return t;
        }
    }
    return -1;
}

static void norm_heads(const colibri_norm *norm, float *x, int64_t width) {
    if (!norm->weight) return;
    for (int64_t i = 0; i < width; i += norm->width) rms_norm(x + i, norm->weight, norm->eps, norm->width, x + i);
}

static void clip_values(float *x, int64_t n, float clip) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] < -clip ? -clip : x[i] > clip ? clip : x[i];
}

/* Turns each head's leading rotary_dim: (a, b) -> (a cos - b sin, b cos + a sin). */
static void rope_heads(const colibri_attention *layer, const float *cos, const float *sin, float *x, int heads) {
    const int half = layer->rotary_dim / 2;
    const int apart = layer->rope_pairs ? 1 : half, step = layer->rope_pairs ? 2 : 1;
    for (int h = 0; h < heads; h++, x += layer->head_dim) {
        for (int i = 0; i < half; i++) {
            float *p = x + i * step;
            const float a = p[0], b = p[apart];
            p[0] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
            p[apart] = __builtin_fmaf(b, cos[i], a * sin[i]);
        }
    }
}

/* q, k and v of rows [begin, end) become final; k and v are rounded into the pool. */
static void finish_projections(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    const colibri_attention *layer = job->layer;
    const int64_t hd = layer->head_dim, q_width = layer->num_heads * hd, kv_width = layer->num_kv_heads * hd;
    for (int64_t t = begin; t < end; t++) {
        float *q = job->q + t * q_width, *k = job->k + t * kv_width, *v = job->v + t * kv_width;
        const int64_t half = layer->rotary_dim / 2, position = job->batch->positions[t];
        norm_heads(&layer->q_norm, q, q_width);
        norm_heads(&layer->k_norm, k, kv_width);
        clip_values(q, q_width, layer->clip);
        clip_values(k, kv_width, layer->clip);
        clip_values(v, kv_width, layer->clip);
        rope_heads(layer, job->batch->cos + t * half, job->batch->sin + t * half, q, layer->num_heads);
        rope_heads(layer, job->batch->cos + t * half, job->batch->sin + t * half, k, layer->num_kv_heads);
        uint8_t *at = key_of(job, t, position) + position % BLOCK * hd * item_size(job->kv->format);
        for (int64_t h = 0; h < layer->num_kv_heads; h++, at += head_nbytes(job)) {
            narrow(job->kv->format, k + h * hd, hd, at);
            narrow(job->kv->format, v + h * hd, hd, at + layer->num_kv_heads * head_nbytes(job));
        }
    }
}

/* o [hd] = fma(p_j, v_j, o) by ascending j. D sixteens at a time stay in registers. */
INLINE void add_values_of(int format, int D, const uint8_t *v, int64_t stride, const float *p, int n, float *o) {
    vf16 acc[4];
    for (int d = 0; d < D; d++) acc[d] = vf16_f32(o + 16 * d);
    for (int j = 0; j < n; j++) {
        const vf16 weight = vf16_set1(p[j]);
        for (int d = 0; d < D; d++) acc[d] = vf16_fma(weight, vf16_load(format, v + j * stride + 16 * d * item_size(format)), acc[d]);
    }
    for (int d = 0; d < D; d++) vf16_store(o + 16 * d, acc[d]);
}

INLINE void add_values_in(int format, const uint8_t *v, int64_t hd, const float *p, int n, float *o) {
    const int size = item_size(format);
    int64_t d = 0;
    for (; d + 64 <= hd; d += 64) add_values_of(format, 4, v + d * size, hd * size, p, n, o + d);
    for (; d + 16 <= hd; d += 16) add_values_of(format, 1, v + d * size, hd * size, p, n, o + d);
    for (; d < hd; d++) {
        for (int j = 0; j < n; j++) {
            float value[16];
            vf16_store(value, vf16_head(format, v + (j * hd + d) * size, 1));
            o[d] = __builtin_fmaf(p[j], value[0], o[d]);
        }
    }
}

static void add_values(int format, const uint8_t *v, int64_t hd, const float *p, int n, float *o) {
    switch (format) {
    case F32_CODE: add_values_in(F32_CODE, v, hd, p, n, o); break;
    case F16_CODE: add_values_in(F16_CODE, v, hd, p, n, o); break;
    default: add_values_in(BF16_CODE, v, hd, p, n, o); break;
    }
}

/* A softmax in progress: the largest score so far, the sum of exp(score - max), and the values weighted likewise. */
typedef struct {
    float max, sum;
    float *o; /* [hd] */
} softmax;

/* Takes in the n keys of one block from k and v on; scores stand at their place in the block. */
static void attend_block(const attention_job *job, const float *q, const uint8_t *k, const uint8_t *v, int place, int n, softmax *s) {
    const int64_t hd = job->layer->head_dim, stride = hd * item_size(job->kv->format);
    float p[BLOCK] = {0};
    const float *const rows[1] = {q};
    float_rows(job->kv->format, k + place * stride, stride, n, rows, 1, hd, p + place, BLOCK);
    float max = s->max;
    for (int j = place; j < place + n; j++) {
        p[j] *= job->layer->scale;
        max = p[j] > max ? p[j] : max;
    }
    for (int j = place; j < place + n; j++) p[j] = exp_f32(p[j] - max);
    const float keep = exp_f32(s->max - max);
    vf16 sums = vf16_f32(p);
    for (int j = 16; j < BLOCK; j += 16) sums = vf16_add(sums, vf16_f32(p + j));
    s->sum = __builtin_fmaf(s->sum, keep, vf16_sum(sums));
    for (int64_t d = 0; d < hd; d++) s->o[d] *= keep;
    add_values(job->kv->format, v + place * stride, hd, p + place, n, s->o);
    s->max = max;
}

/* Keys [first, last] of one split, all within one multiple of 1,024. */
static void attend_split(const attention_job *job, int64_t row, int64_t kv_head, const float *q, int64_t first, int64_t last, softmax *s) {
    *s = (softmax){-__builtin_inff(), 0.0f, s->o};
    memset(s->o, 0, (size_t)job->layer->head_dim * sizeof *s->o);
    for (int64_t block = first / BLOCK; block <= last / BLOCK; block++) {
        const int64_t from = block * BLOCK > first ? block * BLOCK : first;
        const int64_t to = block * BLOCK + BLOCK - 1 < last ? block * BLOCK + BLOCK - 1 : last;
        const uint8_t *k = key_of(job, row, from) + kv_head * head_nbytes(job);
        attend_block(job, q, k, k + job->layer->num_kv_heads * head_nbytes(job), (int)(from % BLOCK), (int)(to - from + 1), s);
    }
}

/* Combines the next split into what the splits before it found. */
static void combine(softmax *all, const softmax *next, int64_t hd) {
    const float max = next->max > all->max ? next->max : all->max;
    const float a = exp_f32(all->max - max), b = exp_f32(next->max - max);
    all->sum = __builtin_fmaf(next->sum, b, all->sum * a);
    for (int64_t d = 0; d < hd; d++) all->o[d] = __builtin_fmaf(next->o[d], b, all->o[d] * a);
    all->max = max;
}

static void attend_head(const attention_job *job, int64_t row, int64_t head) {
    const colibri_attention *layer = job->layer;
    const int64_t hd = layer->head_dim, kv_head = head / (layer->num_heads / layer->num_kv_heads);
    const int64_t at = (row * layer->num_heads + head) * hd;
    const int64_t first = first_key(job, row), last = job->batch->positions[row];
    float part[MOST_HEAD_DIM];
    softmax all = {.o = job->mixed + at}, next = {.o = part};
    for (int64_t split = first / SPLIT; split <= last / SPLIT; split++) {
        const int64_t from = split * SPLIT > first ? split * SPLIT : first;
        const int64_t to = split * SPLIT + SPLIT - 1 < last ? split * SPLIT + SPLIT - 1 : last;
        softmax *s = split == first / SPLIT ? &all : &next;
        attend_split(job, row, kv_head, job->q + at, from, to, s);
        if (s == &next) combine(&all, &next, hd);
    }
    for (int64_t d = 0; d < hd; d++) all.o[d] /= all.sum;
}

/* Items are groups of heads that share a K/V head, row by row. */
static void attend(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    const int64_t groups = job->layer->num_heads / job->heads_at_once;
    for (int64_t i = begin; i < end; i++) {
        const int64_t head = i % groups * job->heads_at_once;
        for (int64_t h = head; h < head + job->heads_at_once; h++) attend_head(job, i / groups, h);
    }
}

typedef struct {
    float *normed, *q, *k, *v, *mixed;
    input in, mixed_in;
} attention_memory;

static attention_memory take_attention(bump *b, int64_t rows, int64_t D, int64_t q_width, int64_t kv_width, float top, int needed_in, int needed_out) {
    attention_memory m = {0};
    m.normed = take_floats(b, rows * D);
    m.q = take_floats(b, rows * q_width);
    m.k = take_floats(b, rows * kv_width);
    m.v = take_floats(b, rows * kv_width);
    m.mixed = take_floats(b, rows * q_width);
    m.in = take_input(b, m.normed, rows, D, top, needed_in);
    m.mixed_in = take_input(b, m.mixed, rows, q_width, top, needed_out);
    return m;
}

static int32_t attention_step(colibri_context *ctx, const colibri_attention *layer, float *x, const colibri_batch *batch, const colibri_kv *kv) {
    const int64_t rows = batch->rows, D = batch->hidden_size, hd = layer->head_dim;
    const colibri_matrix *const first[3] = {&layer->q_proj, &layer->k_proj, &layer->v_proj}, *const second[1] = {&layer->o_proj};
    bump b = bump_of(ctx);
    attention_memory m = take_attention(&b, rows, D, layer->num_heads * hd, layer->num_kv_heads * hd, top_code(ctx),
                                        groups_needed(ctx, first, 3), groups_needed(ctx, second, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    attention_job job = {layer, batch, kv, m.q, m.k, m.v, m.mixed, &m.mixed_in, 1};
    if (hd > MOST_HEAD_DIM || (ctx->where = bad_row(&job)) >= 0) return COLIBRI_ARGUMENT;
    norm_input(ctx, &m.in, &layer->norm, x, m.normed, rows);
    linear_job projections = {&m.in, rows, 3, STORE, {first[0], first[1], first[2]}, {m.q, m.k, m.v}};
    linear(ctx, &projections);
    pool_run(ctx->pool, finish_projections, &job, rows, 1);
    const int64_t sharing = layer->num_heads / layer->num_kv_heads;
    job.heads_at_once = rows * layer->num_kv_heads >= 4 * pool_threads(ctx->pool) ? sharing : 1;
    pool_run(ctx->pool, attend, &job, rows * (layer->num_heads / job.heads_at_once), 1);
    code_input(ctx, &m.mixed_in, rows);
    linear_one(ctx, &layer->o_proj, &m.mixed_in, rows, x, ADD);
    return COLIBRI_OK;
}

#endif
