/* Attention of many heads over keys that all heads of a row share, whatever they are: blocks of 64 and splits of 1,024 by the rank
   of a key among those that the row sees, whose first numbers are its value. */
#ifndef COLIBRI_KERN_LANE_ATTEND_H
#define COLIBRI_KERN_LANE_ATTEND_H

#include "kern_lanes.h"

enum { MOST_LATENT = 512, MOST_ROPE_DIM = 128, MOST_KEY = MOST_LATENT + MOST_ROPE_DIM };
enum { LANE_PARTS = 96 /* splits that wait to be combined */ };

typedef struct {
    const void *keys; /* what the three functions look at */
    int64_t (*seen)(const void *keys, int64_t row);                                         /* how many keys a row sees, at least one */
    void (*widen)(const void *keys, int64_t row, int64_t rank, int n, float *to);           /* n of them from `rank` on, [n, key_width] */
    void (*fetch)(const void *keys, int64_t row, int64_t rank, int n);                      /* asks for what will be widened next */
    float *queries; /* [rows, heads, key_width]; what attention finds, [value_width], takes their place */
    float *parts;   /* [LANE_PARTS, part_size] */
    const float *sinks; /* [heads] scores without a value, or NULL */
    int64_t heads, key_width, value_width;
    int64_t first, rows; /* of the batch, which `queries` are of */
    float scale;
    int64_t lanes;  /* heads in a group: 16 or 32 */
    int64_t groups; /* of a row */
    int64_t first_split, num_splits;
} lane_job;

typedef struct {
    _Alignas(64) float q[MOST_KEY * LANES], keys[BLOCK * MOST_KEY], p[BLOCK * LANES], o[2][MOST_LATENT * LANES];
} lane_scratch;

/* A group of heads of one row. */
typedef struct {
    int64_t row, rank_end; /* the row in the batch, and how many keys it sees */
    int64_t head;          /* its first */
    int heads, vectors;
    float *queries; /* of its first head */
} lane_group;

static lane_group group_of(const lane_job *job, int64_t i) {
    const int64_t t = i / job->groups, head = i % job->groups * job->lanes, left = job->heads - head;
    lane_group g = {.row = job->first + t, .head = head, .heads = (int)(left < job->lanes ? left : job->lanes)};
    g.rank_end = job->seen(job->keys, g.row), g.vectors = g.heads > 16 ? 2 : 1;
    g.queries = job->queries + (t * job->heads + head) * job->key_width;
    return g;
}

/* Sinks take part in the sums; then the weights are made to add up to one. */
static void finish_group(const lane_job *job, const lane_group *g, softmaxes *s) {
    float keep[LANES];
    for (int l = 0; job->sinks && l < g->heads; l++) {
        const float sink = job->sinks[g->head + l], max = sink > s->max[l] ? sink : s->max[l];
        keep[l] = exp_f32(s->max[l] - max);
        s->sum[l] = __builtin_fmaf(s->sum[l], keep[l], exp_f32(sink - max));
    }
    for (int64_t d = 0; job->sinks && d < job->value_width; d++) {
        for (int l = 0; l < g->heads; l++) s->o[d * LANES + l] *= keep[l];
    }
    finish_lanes(s, g->heads, job->value_width, g->queries, job->key_width);
}

/* What one split holds for a group, whose queries lie in m->q. */
static void lane_split(const lane_job *job, const lane_group *g, int64_t split, lane_scratch *m, softmaxes *s) {
    const int64_t end = split * SPLIT + SPLIT < g->rank_end ? split * SPLIT + SPLIT : g->rank_end;
    begin_softmaxes(s, job->value_width);
    for (int64_t rank = split * SPLIT; rank < end; rank += BLOCK) {
        const int n = (int)(end - rank < BLOCK ? end - rank : BLOCK), next = (int)(end - rank - n < BLOCK ? end - rank - n : BLOCK);
        job->widen(job->keys, g->row, rank, n, m->keys);
        job->fetch(job->keys, g->row, rank + n, next);
        attend_keys(g->vectors, job->scale, m->keys, n, job->key_width, job->value_width, m->q, m->p, s);
    }
}

/* All splits of groups [begin, end), one after the other. */
static void attend_groups(void *arg, int64_t begin, int64_t end) {
    const lane_job *job = arg;
    lane_scratch m;
    for (int64_t i = begin; i < end; i++) {
        const lane_group g = group_of(job, i);
        softmaxes all = {.o = m.o[0]}, next = {.o = m.o[1]};
        fill_lanes(g.queries, job->key_width, g.heads, job->key_width, m.q);
        lane_split(job, &g, 0, &m, &all);
        for (int64_t split = 1; split * SPLIT < g.rank_end; split++) {
            lane_split(job, &g, split, &m, &next);
            combine_lanes(&all, &next, job->value_width);
        }
        finish_group(job, &g, &all);
    }
}

/* Few rows and many keys: splits of every group are one loop. A group has num_splits + 1 parts; the last is all before. */
static int64_t part_size(int64_t value_width) { return (value_width + 2) * LANES; }

static float *lane_part(const lane_job *job, int64_t group, int64_t number) {
    return job->parts + (group * (job->num_splits + 1) + number) * part_size(job->value_width);
}

static softmaxes load_part(const lane_job *job, float *part) {
    softmaxes s = {.o = part};
    memcpy(s.max, part + job->value_width * LANES, sizeof s.max);
    memcpy(s.sum, part + job->value_width * LANES + LANES, sizeof s.sum);
    return s;
}

static void store_part(const lane_job *job, const softmaxes *s) {
    memcpy(s->o + job->value_width * LANES, s->max, sizeof s->max);
    memcpy(s->o + job->value_width * LANES + LANES, s->sum, sizeof s->sum);
}

static void attend_lane_parts(void *arg, int64_t begin, int64_t end) {
    const lane_job *job = arg;
    lane_scratch m;
    for (int64_t i = begin; i < end; i++) {
        const lane_group g = group_of(job, i / job->num_splits);
        const int64_t number = i % job->num_splits, split = job->first_split + number;
        softmaxes s = {.o = lane_part(job, i / job->num_splits, number)};
        if (split * SPLIT >= g.rank_end) continue;
        fill_lanes(g.queries, job->key_width, g.heads, job->key_width, m.q);
        lane_split(job, &g, split, &m, &s);
        store_part(job, &s);
    }
}

static void combine_lane_parts(void *arg, int64_t begin, int64_t end) {
    const lane_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        const lane_group g = group_of(job, i);
        const int64_t last = (g.rank_end - 1) / SPLIT;
        float *before = lane_part(job, i, job->num_splits);
        softmaxes all = load_part(job, before);
        for (int64_t split = job->first_split; split < job->first_split + job->num_splits && split <= last; split++) {
            const softmaxes next = load_part(job, lane_part(job, i, split - job->first_split));
            if (split > 0) {
                combine_lanes(&all, &next, job->value_width);
                continue;
            }
            memcpy(all.max, next.max, sizeof all.max), memcpy(all.sum, next.sum, sizeof all.sum);
            memcpy(all.o, next.o, (size_t)(job->value_width * LANES) * sizeof *all.o);
        }
        store_part(job, &all);
        if (last >= job->first_split && last < job->first_split + job->num_splits) {
            finish_group(job, &g, &all);
        }
    }
}

static void attend_lanes(colibri_context *ctx, lane_job *job) {
    const int64_t threads = pool_threads(ctx->pool), H = job->heads;
    int64_t splits = 1;
    for (int64_t t = job->first; t < job->first + job->rows; t++) {
        const int64_t num = (job->seen(job->keys, t) + SPLIT - 1) / SPLIT;
        splits = num > splits ? num : splits;
    }
    job->lanes = job->rows * ((H + LANES - 1) / LANES) * splits < threads ? 16 : LANES;
    job->groups = (H + job->lanes - 1) / job->lanes;
    const int64_t groups = job->rows * job->groups, most = LANE_PARTS / groups - 1;
    if (threads == 1 || splits == 1 || groups >= 8 * threads || most < 2) {
        pool_run(ctx->pool, attend_groups, job, groups, 1);
        return;
    }
    job->num_splits = splits < most ? splits : most;
    for (job->first_split = 0; job->first_split < splits; job->first_split += job->num_splits) {
        pool_run(ctx->pool, attend_lane_parts, job, groups * job->num_splits, 1);
        pool_run(ctx->pool, combine_lane_parts, job, groups, 1);
    }
}

#endif
