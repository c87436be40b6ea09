/* The sum over keys: blocks of 64 ascending, splits of 1,024, one running maximum and sum for each query. */
#ifndef COLIBRI_KERN_ATTEND_H
#define COLIBRI_KERN_ATTEND_H

#include "kern_linear.h"
#include "kern_mix.h"
#include "kern_softmax.h"

enum { SPLIT = 1024, QUERIES = 16 /* that meet a block at once */, PART_ROWS = 96, MOST_RELATIVE = 64 /* rank of relative biases */ };

typedef struct {
    const colibri_attention *layer;
    const colibri_batch *batch;
    const colibri_kv *kv;
    float *q, *k, *v; /* [rows, H hd], [rows, K hd], [rows, K hd] */
    float *mixed;     /* [rows, H hd] what attention found */
    float *parts;     /* [PART_ROWS, H hd] splits that wait to be combined */
    float *pairs;     /* [rows, H, 2 hd] q and gate of each head where there are gates; or NULL */
    const float *relative;    /* [rows, H, rank] what relative biases are made of, or NULL */
    const float *temperature; /* [rows] which multiplies scores, or NULL */
    const int32_t *selected;  /* [rows, most_selected] ascending, then -1, or NULL */
    int64_t most_selected;
    float *states;    /* [rows, H, 2] max and sum of `mixed` so far */
    int64_t first_split, num_splits;
} attention_job;

/* The block that holds position `position` of the row's sequence: K [heads, hd, 64], int8 followed by scales [heads, 64]; then V,
   the same but [heads, 64, hd]. Keys lie transposed so that sixteen scores grow side by side and none is summed across a register. */
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

/* Asks for memory that will be needed in a while. */
static void fetch(const uint8_t *p, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(p + i, 0, 2);
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

/* Queries of one K/V head and sequence, each with the positions it sees; `rows` and `heads` say whose they are. */
typedef struct {
    int num;
    int64_t kv_head;
    int64_t rows[QUERIES], heads[QUERIES], first[QUERIES], last[QUERIES];
    softmax s[QUERIES];
    float q[QUERIES * WEIGHT_STRIDE]; /* [num, hd] times the scale and log2 e */
    float r[QUERIES * MOST_RELATIVE]; /* [num, rank] times log2 e */
} bunch;

/* For each place of the block at `start` the weights [rank, 64] of its distance from `position`; 0 where all are beyond the extent. */
static int take_distances(const colibri_attention *layer, int64_t position, int64_t start, float *near) {
    const int64_t far = position - start, extent = layer->relative_extent; /* place j is `far - j` away */
    const int64_t from = far >= extent ? far - extent + 1 : 0, to = far < BLOCK ? far : BLOCK - 1;
    if (from > to) return 0;
    memset(near, 0, (size_t)layer->relative_rank * BLOCK * sizeof *near);
    for (int64_t i = 0; i < layer->relative_rank; i++) {
        const float *weight = layer->relative + i * extent + far;
        for (int64_t j = from; j <= to; j++) near[i * BLOCK + j] = weight[-j];
    }
    return 1;
}

/* Adds a bias to each score [64]: one chain over the rank, ascending. */
static void add_relative(int64_t rank, const float *r, const float *near, float *p) {
    for (int j = 0; j < BLOCK; j += 16) {
        vf16 bias = vf16_zero();
        for (int64_t i = 0; i < rank; i++) bias = vf16_fma(vf16_set1(r[i]), vf16_f32(near + i * BLOCK + j), bias);
        vf16_store(p + j, vf16_add(vf16_f32(p + j), bias));
    }
}

/* The places of the block at `start` whose positions lie in [from, to] and are seen by query i, as bits. */
static uint64_t seen_places(const attention_job *job, const bunch *b, int i, int64_t start, int64_t from, int64_t to) {
    from = (b->first[i] > from ? b->first[i] : from) - start, to = (b->last[i] < to ? b->last[i] : to) - start;
    if (from > to) return 0;
    const uint64_t all = (~0ull >> (63 - to)) & (~0ull << from);
    if (!job->selected) return all;
    const int32_t *row = job->selected + b->rows[i] * job->most_selected;
    int64_t low = 0, high = job->most_selected; /* the first that is not before the block */
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (row[middle] >= 0 && row[middle] < start) low = middle + 1;
        else high = middle;
    }
    uint64_t chosen = 0;
    for (; low < job->most_selected && row[low] >= 0 && row[low] < start + BLOCK; low++) chosen |= 1ull << (row[low] - start);
    return all & chosen;
}

/* Adds the values of a block: place j of query i weighs p[i][j], j in [begin[i], end[i]]. Neighbours that see the same keys share
   one pass over their values. */
static void add_values(int format, mix values, bunch *b, const float *p, const int *begin, const int *end) {
    const uint8_t *first = values.m;
    float *o[QUERIES];
    for (int i = 0, next; i < b->num; i = next) {
        int shared = end[i];
        for (next = i; next < b->num && begin[next] == begin[i]; next++) {
            o[next - i] = b->s[next].o;
            shared = end[next] < shared ? end[next] : shared;
        }
        values.m = first + begin[i] * values.stride, values.num_rows = shared - begin[i] + 1;
        if (values.num_rows > 0) mix_rows(format, &values, p + i * WEIGHT_STRIDE + begin[i], o, next - i);
        shared = shared < begin[i] ? begin[i] - 1 : shared;
        for (int k = i, same; k < next; k = same) { /* what each sees beyond that */
            for (same = k; same < next && end[same] == end[k]; same++) o[same - k] = b->s[same].o;
            values.m = first + (shared + 1) * values.stride, values.num_rows = end[k] - shared;
            if (values.num_rows > 0) mix_rows(format, &values, p + k * WEIGHT_STRIDE + shared + 1, o, same - k);
        }
    }
}

/* Takes in one block: positions [start, start + 64) that lie in [from, to]; more follow, up to `last`, in this split or
   in the next one, which the same thread usually takes. Each query uses those that it sees. */
static void attend_block(const attention_job *job, bunch *b, int64_t start, int64_t from, int64_t to, int64_t last) {
    const int64_t hd = job->layer->head_dim, size = item_size(job->kv->format), h = b->kv_head;
    uint8_t *keys = key_of(job, b->rows[0], from), *values = keys + keys_nbytes(job);
    const uint8_t *k = keys + h * head_nbytes(job), *v = values + h * head_nbytes(job);
    const uint8_t *next = to < last ? key_of(job, b->rows[0], to + 1) + h * head_nbytes(job) : k; /* while K is used, the next K is asked for */
    const int is_int8 = job->kv->format == INT8_ROWS_CODE;
    float p[QUERIES * WEIGHT_STRIDE], near[MOST_RELATIVE * BLOCK], *scores[QUERIES];
    int begin[QUERIES], end[QUERIES], is_near = 0;
    uint64_t seen[QUERIES], any = 0;
    for (int i = 0; i < b->num; i++) {
        const int same = i > 0 && b->rows[i] == b->rows[i - 1];
        any |= seen[i] = same ? seen[i - 1] : seen_places(job, b, i, start, from, to);
        begin[i] = seen[i] ? __builtin_ctzll(seen[i]) : 0, end[i] = seen[i] ? 63 - __builtin_clzll(seen[i]) : -1;
        scores[i] = p + i * WEIGHT_STRIDE;
    }
    if (!any) return;
    const mix scoring = {k, BLOCK * size, hd, (from - start) / 32 * 32, (to - start) / 32 * 32 + 32, next, 1};
    mix_rows(job->kv->format, &scoring, b->q, scores, b->num);
    for (int i = 0; i < b->num; i++) {
        if (!seen[i]) continue;
        if (is_int8) multiply_by(scales_of(job, keys, h), scores[i]);
        if (job->relative && (i == 0 || b->rows[i] != b->rows[i - 1])) is_near = take_distances(job->layer, b->last[i], start, near);
        if (is_near) add_relative(job->layer->relative_rank, b->r + i * MOST_RELATIVE, near, scores[i]);
        weigh_keys(scores[i], seen[i], &b->s[i], hd);
        if (is_int8) multiply_by(scales_of(job, values, h), scores[i]);
    }
    add_values(job->kv->format, (mix){v, hd * size, 0, 0, hd, next + keys_nbytes(job), 0}, b, p, begin, end);
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
    const int64_t end = (split + 1) * SPLIT < last + 1 ? (split + 1) * SPLIT : last + 1;
    for (int64_t start = first / BLOCK * BLOCK; start < end; start += BLOCK) {
        attend_block(job, b, start, start > first ? start : first, start + BLOCK < end ? start + BLOCK - 1 : end - 1, last);
    }
    for (int i = 0; i < b->num; i++) mix_settle(job->kv->format, b->s[i].o, job->layer->head_dim);
}

/* The sink takes part in the sum; then the weights are made to add up to one. */
static void finish_softmax(const attention_job *job, int64_t head, softmax *s) {
    const int64_t hd = job->layer->head_dim;
    if (job->layer->sinks) {
        const float sink = job->layer->sinks[head] * LOG2_E, max = sink > s->max ? sink : s->max, keep = exp2_falling(s->max - max);
        s->sum = __builtin_fmaf(s->sum, keep, exp2_falling(sink - max));
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

static int64_t num_bunches(const attention_job *job) {
    const int64_t per_bunch = heads_in_bunch(job), rows = rows_in_bunch(job);
    return (job->batch->rows + rows - 1) / rows * job->layer->num_kv_heads * ((sharing(job) + per_bunch - 1) / per_bunch);
}

/* Bunch `i`; a last one, and one whose rows belong to several sequences, is taken apart by the caller. */
static place place_of(const attention_job *job, int64_t i) {
    const int64_t per_bunch = heads_in_bunch(job), parts = (sharing(job) + per_bunch - 1) / per_bunch, kv_heads = job->layer->num_kv_heads;
    const int64_t per_head = num_bunches(job) / kv_heads; /* heads come one after another: the rows of a chunk share what a cache holds */
    place at = {.row = i % per_head / parts * rows_in_bunch(job), .kv_head = i / per_head};
    const int64_t skip = i % parts * per_bunch, left = sharing(job) - skip, rows = job->batch->rows - at.row;
    at.head = at.kv_head * sharing(job) + skip, at.heads = left < per_bunch ? left : per_bunch;
    at.rows = rows < rows_in_bunch(job) ? rows : rows_in_bunch(job);
    return at;
}

/* The leading rows of a place that belong to one sequence; the place keeps the others. */
static void take_bunch(const attention_job *job, place *at, bunch *b) {
    const int64_t hd = job->layer->head_dim;
    const int32_t member = job->batch->members[at->row];
    const int64_t rank = job->relative ? job->layer->relative_rank : 0;
    b->num = 0, b->kv_head = at->kv_head;
    for (; at->rows > 0 && job->batch->members[at->row] == member; at->row++, at->rows--) {
        for (int64_t h = at->head; h < at->head + at->heads; h++, b->num++) {
            const int64_t query = at->row * job->layer->num_heads + h;
            const float heat = job->temperature ? LOG2_E * job->temperature[at->row] : LOG2_E; /* the softmax is one of powers of two */
            const float scale = job->layer->scale * heat, *q = job->q + query * hd;
            float *to = b->q + b->num * WEIGHT_STRIDE;
            b->rows[b->num] = at->row, b->heads[b->num] = h;
            b->first[b->num] = first_key(job, at->row), b->last[b->num] = job->batch->positions[at->row];
            for (int64_t d = 0; d < hd; d++) to[d] = q[d] * scale;
            for (int64_t i = 0; i < rank; i++) b->r[b->num * MOST_RELATIVE + i] = job->relative[query * rank + i] * heat;
        }
    }
}

/* Query i of a bunch among those of all rows. */
static int64_t query_of(const attention_job *job, const bunch *b, int i) { return b->rows[i] * job->layer->num_heads + b->heads[i]; }

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
        all[i] = (softmax){-__builtin_inff(), 0.0f, job->mixed + query_of(job, b, i) * hd};
    }
    for (int64_t split = first; split <= last; split++) {
        for (int i = 0; i < b->num; i++) b->s[i].o = b->first[i] / SPLIT == split ? all[i].o : part[i];
        attend_split(job, b, split);
        for (int i = 0; i < b->num; i++) {
            if (b->first[i] / SPLIT == split) all[i] = b->s[i];
            else if (b->first[i] / SPLIT < split && b->last[i] / SPLIT >= split) combine(&all[i], &b->s[i], hd);
        }
    }
    for (int i = 0; i < b->num; i++) finish_softmax(job, b->heads[i], &all[i]);
}

static void attend(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    bunch b;
    for (int64_t i = begin; i < end; i++) {
        place at = place_of(job, i);
        while (at.rows > 0) {
            take_bunch(job, &at, &b);
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
    bunch b;
    for (int64_t i = begin; i < end; i++) {
        place at = place_of(job, i / job->num_splits);
        const int64_t split = job->first_split + i % job->num_splits;
        while (at.rows > 0) {
            take_bunch(job, &at, &b);
            for (int q = 0; q < b.num; q++) b.s[q].o = part_of(job, query_of(job, &b, q), split);
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
