/* The sum over keys: blocks of 64 ascending, splits of 1,024, one running maximum and sum for each query. */
#ifndef COLIBRI_KERN_ATTEND_H
#define COLIBRI_KERN_ATTEND_H

#include "kern_linear.h"

enum { BLOCK = 64, SPLIT = 1024, MOST_HEAD_DIM = 1024, QUERIES = 8 /* that meet a block at once */, PART_ROWS = 96 };

typedef struct {
    const colibri_attention *layer;
    const colibri_batch *batch;
    const colibri_kv *kv;
    float *q, *k, *v; /* [rows, H hd], [rows, K hd], [rows, K hd] */
    float *mixed;     /* [rows, H hd] what attention found */
    float *parts;     /* [PART_ROWS, H hd] splits that wait to be combined */
    float *pairs;     /* [rows, H, 2 hd] q and gate of each head where there are gates; or NULL */
    float *states;    /* [rows, H, 2] max and sum of `mixed` so far */
    int64_t first_split, num_splits;
} attention_job;

/* The block that holds position `position` of the row's sequence: K [heads, 64, hd], int8 followed by scales [heads, 64]; then V. */
static uint8_t *key_of(const attention_job *job, int64_t row, int64_t position) {
    const colibri_batch *batch = job->batch;
    const int32_t block = batch->block_tables[(int64_t)batch->members[row] * batch->table_width + position / BLOCK];
    return job->kv->pool + block * job->kv->block_nbytes + job->kv->offset;
}

static int64_t head_nbytes(const attention_job *job) { return (int64_t)BLOCK * job->layer->head_dim * item_size(job->kv->format); }

/* From K to V. */
static int64_t keys_nbytes(const attention_job *job) {
    const int64_t scales = job->kv->format == INT8_ROWS_CODE ? BLOCK * 4 : 0;
    return job->layer->num_kv_heads * (head_nbytes(job) + scales);
}

/* The scales [64] of a head of K (or of V), whose first head is at `first`. */
static uint8_t *scales_of(const attention_job *job, uint8_t *first, int64_t head) {
    return first + job->layer->num_kv_heads * head_nbytes(job) + head * BLOCK * 4;
}

/* First position that the row sees. */
static int64_t first_key(const attention_job *job, int64_t row) {
    const int64_t first = (int64_t)job->batch->positions[row] - job->layer->window + 1;
    return job->layer->window > 0 && first > 0 ? first : 0;
}

/* The first row whose sequence or blocks are out of range, or -1. */
static int32_t bad_row(const attention_job *job) {
    const colibri_batch *b = job->batch;
    const int64_t layer_nbytes = 2 * keys_nbytes(job);
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

#ifdef VEC_AVX512
enum { VALUE_QUERIES = 4, VALUE_STEP = 64 };
#else
enum { VALUE_QUERIES = 2, VALUE_STEP = 32 };
#endif

/* Q outputs [16 D] += p_j v_j by ascending j; they stay in registers. */
INLINE void add_values_of(int format, int Q, int D, const uint8_t *v, int64_t stride, const float *p, int n, float *const *o, int64_t at) {
    vf16 acc[4][8];
    for (int q = 0; q < Q; q++) {
        for (int d = 0; d < D; d++) acc[q][d] = vf16_f32(o[q] + at + 16 * d);
    }
    for (int j = 0; j < n; j++) {
        vf16 value[8];
        for (int d = 0; d < D; d++) value[d] = vf16_load(format, v + j * stride + (at + 16 * d) * item_size(format));
        for (int q = 0; q < Q; q++) {
            const vf16 weight = vf16_set1(p[q * BLOCK + j]);
            for (int d = 0; d < D; d++) acc[q][d] = vf16_fma(weight, value[d], acc[q][d]);
        }
    }
    for (int q = 0; q < Q; q++) {
        for (int d = 0; d < D; d++) vf16_store(o[q] + at + 16 * d, acc[q][d]);
    }
}

INLINE void add_values_in(int format, int Q, const uint8_t *v, int64_t hd, const float *p, int n, float *const *o) {
    const int64_t stride = hd * item_size(format);
    int64_t at = 0;
    if (Q == 1) { /* fewer outputs to keep, so more of each: one addition must not wait for the last */
        for (; at + 2 * VALUE_STEP <= hd; at += 2 * VALUE_STEP) add_values_of(format, Q, VALUE_STEP / 8, v, stride, p, n, o, at);
    }
    for (; at + VALUE_STEP <= hd; at += VALUE_STEP) add_values_of(format, Q, VALUE_STEP / 16, v, stride, p, n, o, at);
    for (; at + 16 <= hd; at += 16) add_values_of(format, Q, 1, v, stride, p, n, o, at);
    for (; at < hd; at++) {
        for (int j = 0; j < n; j++) {
            float value[16];
            vf16_store(value, vf16_head(format, v + j * stride + at * item_size(format), 1));
            for (int q = 0; q < Q; q++) o[q][at] = __builtin_fmaf(p[q * BLOCK + j], value[0], o[q][at]);
        }
    }
}

INLINE void add_values_to(int format, const uint8_t *v, int64_t hd, const float *p, int n, float *const *o, int num) {
    for (; num >= VALUE_QUERIES; num -= VALUE_QUERIES, p += VALUE_QUERIES * BLOCK, o += VALUE_QUERIES) {
        add_values_in(format, VALUE_QUERIES, v, hd, p, n, o);
    }
    for (; num > 0; num--, p += BLOCK, o++) add_values_in(format, 1, v, hd, p, n, o);
}

/* o[i] [hd] = fma(p[i * 64 + j], v_j, o[i]) by ascending j < n, for `num` queries. */
static void add_values(int format, const uint8_t *v, int64_t hd, const float *p, int n, float *const *o, int num) {
    switch (format) {
    case F32_CODE: add_values_to(F32_CODE, v, hd, p, n, o, num); break;
    case F16_CODE: add_values_to(F16_CODE, v, hd, p, n, o, num); break;
    case INT8_ROWS_CODE: add_values_to(INT8_ROWS_CODE, v, hd, p, n, o, num); break;
    default: add_values_to(BF16_CODE, v, hd, p, n, o, num); break;
    }
}

/* A softmax in progress: the largest score so far, the sum of exp(score - max), and the values weighted likewise. */
typedef struct {
    float max, sum;
    float *o; /* [hd] */
} softmax;

/* Queries of one K/V head and sequence, each with the positions it sees; `rows` holds their rows in the batch. */
typedef struct {
    int num;
    int64_t kv_head;
    int64_t rows[QUERIES], first[QUERIES], last[QUERIES];
    const float *q[QUERIES];
    softmax s[QUERIES];
} bunch;

static void multiply_by(const uint8_t *scales, int from, int to, float *p) {
    for (int j = from; j <= to; j++) {
        float scale;
        memcpy(&scale, scales + 4 * j, sizeof scale);
        p[j] *= scale;
    }
}

/* Scores [64] of one query, of which places [from, to] count, become weights; the rest zero. */
static void weigh_keys(const attention_job *job, float *p, int from, int to, softmax *s) {
    const int64_t hd = job->layer->head_dim;
    const float scale = job->layer->scale;
    float max = s->max;
    for (int j = 0; j < from; j++) p[j] = 0.0f;
    for (int j = to + 1; j < BLOCK; j++) p[j] = 0.0f;
    for (int j = from; j <= to; j++) {
        p[j] *= scale;
        max = p[j] > max ? p[j] : max;
    }
    for (int j = from; j <= to; j++) p[j] = exp_f32(p[j] - max);
    const float keep = exp_f32(s->max - max);
    vf16 sums = vf16_f32(p);
    for (int j = 16; j < BLOCK; j += 16) sums = vf16_add(sums, vf16_f32(p + j));
    s->sum = __builtin_fmaf(s->sum, keep, vf16_sum(sums));
    if (keep != 1.0f) {
        for (int64_t d = 0; d < hd; d++) s->o[d] *= keep;
    }
    s->max = max;
}

/* Asks for memory that will be needed in a while. */
static void fetch(const uint8_t *p, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

/* Takes in one block: positions [start, start + 64) that lie in [from, to]; more follow, up to `last`. Each query uses
   those that it sees. */
static void attend_block(const attention_job *job, bunch *b, int64_t start, int64_t from, int64_t to, int64_t last) {
    const int64_t hd = job->layer->head_dim, stride = hd * item_size(job->kv->format);
    uint8_t *keys = key_of(job, b->rows[0], from), *values = keys + keys_nbytes(job);
    const uint8_t *k = keys + b->kv_head * head_nbytes(job), *v = values + b->kv_head * head_nbytes(job);
    const int is_int8 = job->kv->format == INT8_ROWS_CODE, place = (int)(from - start);
    float p[QUERIES * BLOCK] = {0};
    int begin[QUERIES], end[QUERIES];
    fetch(v + place * stride, (to - from + 1) * stride);
    float_rows(job->kv->format, k + place * stride, stride, (int)(to - from + 1), b->q, b->num, hd, p + place, BLOCK);
    for (int i = 0; i < b->num; i++) {
        begin[i] = (int)((b->first[i] > from ? b->first[i] : from) - start), end[i] = (int)((b->last[i] < to ? b->last[i] : to) - start);
        if (begin[i] > end[i]) continue;
        if (is_int8) multiply_by(scales_of(job, keys, b->kv_head), begin[i], end[i], p + i * BLOCK);
        weigh_keys(job, p + i * BLOCK, begin[i], end[i], &b->s[i]);
        if (is_int8) multiply_by(scales_of(job, values, b->kv_head), begin[i], end[i], p + i * BLOCK);
    }
    if (to < last) fetch(key_of(job, b->rows[0], to + 1) + b->kv_head * head_nbytes(job), head_nbytes(job));
    for (int i = 0, next; i < b->num; i = next) { /* neighbours that see the same keys share one pass over their values */
        float *o[QUERIES];
        for (next = i; next < b->num && begin[next] == begin[i] && end[next] == end[i]; next++) o[next - i] = b->s[next].o;
        if (begin[i] > end[i]) continue;
        add_values(job->kv->format, v + begin[i] * stride, hd, p + i * BLOCK + begin[i], end[i] - begin[i] + 1, o, next - i);
    }
}

/* What a split holds for the queries of a bunch; a query that sees none of it keeps max = -inf. */
static void attend_split(const attention_job *job, bunch *b, int64_t split) {
    int64_t first = b->first[0], last = b->last[0];
    for (int i = 0; i < b->num; i++) {
        b->s[i].max = -__builtin_inff(), b->s[i].sum = 0.0f;
        memset(b->s[i].o, 0, (size_t)job->layer->head_dim * sizeof *b->s[i].o);
        first = b->first[i] < first ? b->first[i] : first, last = b->last[i] > last ? b->last[i] : last;
    }
    first = split * SPLIT > first ? split * SPLIT : first;
    last = split * SPLIT + SPLIT - 1 < last ? split * SPLIT + SPLIT - 1 : last;
    for (int64_t start = first / BLOCK * BLOCK; start <= last; start += BLOCK) {
        attend_block(job, b, start, start > first ? start : first, start + BLOCK - 1 < last ? start + BLOCK - 1 : last, last);
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

/* The sink takes part in the sum; then the weights are made to add up to one. */
static void finish_softmax(const attention_job *job, int64_t head, softmax *s) {
    const int64_t hd = job->layer->head_dim;
    if (job->layer->sinks) {
        const float sink = job->layer->sinks[head], max = sink > s->max ? sink : s->max, keep = exp_f32(s->max - max);
        s->sum = __builtin_fmaf(s->sum, keep, exp_f32(sink - max));
        for (int64_t d = 0; d < hd; d++) s->o[d] *= keep;
    }
    for (int64_t d = 0; d < hd; d++) s->o[d] /= s->sum;
}

static int64_t sharing(const attention_job *job) { return job->layer->num_heads / job->layer->num_kv_heads; }

/* Rows and heads of a bunch: `rows_in_bunch` rows of as many of the heads that share a K/V head as fit. */
static int64_t heads_in_bunch(const attention_job *job) { return sharing(job) < QUERIES ? sharing(job) : QUERIES; }
static int64_t rows_in_bunch(const attention_job *job) { return QUERIES / heads_in_bunch(job); }

typedef struct {
    int64_t row, rows, kv_head, head, heads; /* heads [head, head + heads) of rows [row, row + rows) */
} place;

/* Bunch `i`; a last one, and one whose rows belong to several sequences, is taken apart by the caller. */
static place place_of(const attention_job *job, int64_t i) {
    const int64_t per_bunch = heads_in_bunch(job), parts = (sharing(job) + per_bunch - 1) / per_bunch, kv_heads = job->layer->num_kv_heads;
    place at = {.row = i / (parts * kv_heads) * rows_in_bunch(job), .kv_head = i / parts % kv_heads};
    const int64_t skip = i % parts * per_bunch, left = sharing(job) - skip, rows = job->batch->rows - at.row;
    at.head = at.kv_head * sharing(job) + skip, at.heads = left < per_bunch ? left : per_bunch;
    at.rows = rows < rows_in_bunch(job) ? rows : rows_in_bunch(job);
    return at;
}

static int64_t num_bunches(const attention_job *job) {
    const int64_t per_bunch = heads_in_bunch(job), rows = rows_in_bunch(job);
    return (job->batch->rows + rows - 1) / rows * job->layer->num_kv_heads * ((sharing(job) + per_bunch - 1) / per_bunch);
}

/* The leading rows of a place that belong to one sequence; the place keeps the others. */
static bunch take_bunch(const attention_job *job, place *at) {
    const int64_t hd = job->layer->head_dim;
    bunch b = {.kv_head = at->kv_head};
    const int32_t member = job->batch->members[at->row];
    for (; at->rows > 0 && job->batch->members[at->row] == member; at->row++, at->rows--) {
        for (int64_t h = at->head; h < at->head + at->heads; h++, b.num++) {
            b.rows[b.num] = at->row, b.first[b.num] = first_key(job, at->row), b.last[b.num] = job->batch->positions[at->row];
            b.q[b.num] = job->q + (at->row * job->layer->num_heads + h) * hd;
        }
    }
    return b;
}

/* The splits that some query of a bunch sees. */
static void splits_of(const bunch *b, int64_t *first, int64_t *last) {
    *first = b->first[0] / SPLIT, *last = b->last[0] / SPLIT;
    for (int i = 1; i < b->num; i++) {
        *first = b->first[i] / SPLIT < *first ? b->first[i] / SPLIT : *first;
        *last = b->last[i] / SPLIT > *last ? b->last[i] / SPLIT : *last;
    }
}

/* All splits of a bunch, one after the other. */
static void attend_bunch(const attention_job *job, bunch *b) {
    const int64_t hd = job->layer->head_dim;
    float part[QUERIES][MOST_HEAD_DIM];
    softmax all[QUERIES];
    int64_t first, last;
    splits_of(b, &first, &last);
    for (int i = 0; i < b->num; i++) {
        all[i] = (softmax){-__builtin_inff(), 0.0f, job->mixed + (b->q[i] - job->q)};
    }
    for (int64_t split = first; split <= last; split++) {
        for (int i = 0; i < b->num; i++) b->s[i].o = b->first[i] / SPLIT == split ? all[i].o : part[i];
        attend_split(job, b, split);
        for (int i = 0; i < b->num; i++) {
            if (b->first[i] / SPLIT == split) all[i] = b->s[i];
            else if (b->first[i] / SPLIT < split && b->last[i] / SPLIT >= split) combine(&all[i], &b->s[i], hd);
        }
    }
    for (int i = 0; i < b->num; i++) finish_softmax(job, (b->q[i] - job->q) / hd % job->layer->num_heads, &all[i]);
}

static void attend(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        place at = place_of(job, i);
        while (at.rows > 0) {
            bunch b = take_bunch(job, &at);
            attend_bunch(job, &b);
        }
    }
}

/* Few rows and many keys: splits [first_split, first_split + num_splits) of every bunch are one loop, kept as o, max and sum. */
static float *part_of(const attention_job *job, int64_t query, int64_t split) {
    return job->parts + (query * job->num_splits + split - job->first_split) * (job->layer->head_dim + 2);
}

static void attend_parts(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    const int64_t hd = job->layer->head_dim;
    for (int64_t i = begin; i < end; i++) {
        place at = place_of(job, i / job->num_splits);
        const int64_t split = job->first_split + i % job->num_splits;
        while (at.rows > 0) {
            bunch b = take_bunch(job, &at);
            for (int q = 0; q < b.num; q++) b.s[q].o = part_of(job, (b.q[q] - job->q) / hd, split);
            attend_split(job, &b, split);
            for (int q = 0; q < b.num; q++) b.s[q].o[hd] = b.s[q].max, b.s[q].o[hd + 1] = b.s[q].sum;
        }
    }
}

/* The first `first_split` splits are in `mixed`, max and sum behind all parts; the loop's are added. */
static void combine_parts(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    const int64_t hd = job->layer->head_dim, H = job->layer->num_heads;
    for (int64_t query = begin; query < end; query++) {
        const int64_t row = query / H, first = first_key(job, row) / SPLIT, last = job->batch->positions[row] / SPLIT;
        float *state = job->states + 2 * query;
        softmax all = {state[0], state[1], job->mixed + query * hd};
        for (int64_t split = job->first_split; split < job->first_split + job->num_splits && split <= last; split++) {
            float *part = part_of(job, query, split);
            const softmax next = {part[hd], part[hd + 1], part};
            if (split < first) continue;
            if (split > first) combine(&all, &next, hd);
            else all.max = next.max, all.sum = next.sum, memcpy(all.o, part, (size_t)hd * sizeof *part);
        }
        state[0] = all.max, state[1] = all.sum;
        if (last >= job->first_split && last < job->first_split + job->num_splits) finish_softmax(job, query % H, &all);
    }
}

/* Splits that fit `parts` at once; 0 where rows alone keep all threads busy. */
static int64_t splits_at_once(const colibri_context *ctx, const attention_job *job) {
    const int64_t queries = job->batch->rows * job->layer->num_heads, hd = job->layer->head_dim;
    if (pool_threads(ctx->pool) == 1 || num_bunches(job) >= 8 * pool_threads(ctx->pool)) return 0;
    return (PART_ROWS * job->layer->num_heads * hd - 2 * queries) / (queries * (hd + 2));
}

static void attend_all(colibri_context *ctx, attention_job *job) {
    int64_t first = INT64_MAX, last = 0;
    for (int64_t t = 0; t < job->batch->rows; t++) {
        const int64_t from = first_key(job, t) / SPLIT, to = job->batch->positions[t] / SPLIT;
        first = from < first ? from : first, last = to > last ? to : last;
    }
    const int64_t most = splits_at_once(ctx, job), queries = job->batch->rows * job->layer->num_heads;
    if (most < 2 || first == last) {
        pool_run(ctx->pool, attend, job, num_bunches(job), 1);
        return;
    }
    job->states = job->parts + PART_ROWS * job->layer->num_heads * job->layer->head_dim - 2 * queries;
    for (job->first_split = first; job->first_split <= last; job->first_split += job->num_splits) {
        job->num_splits = last - job->first_split + 1 < most ? last - job->first_split + 1 : most;
        pool_run(ctx->pool, attend_parts, job, num_bunches(job) * job->num_splits, 1);
        pool_run(ctx->pool, combine_parts, job, queries, pool_grain(ctx->pool, queries, 8));
    }
}

#endif
