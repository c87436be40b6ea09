/* Which keys a row sees: the lightning indexer's scores of all earlier entries, and the exact best of them. */
#ifndef COLIBRI_KERN_INDEX_H
#define COLIBRI_KERN_INDEX_H

#include "kern_lanes.h"
#include "kern_plane.h"

enum { MOST_INDEX_HEADS = 128, MOST_INDEX_DIM = 256, INDEX_ROWS = 8 /* whose scores are kept at once, at least */ };

typedef struct {
    const colibri_batch *batch;
    const colibri_plane *plane;
    const float *q;       /* [rows, n hd] of the rows at hand, rotated */
    const float *weights; /* [batch rows, n] */
    float *scores;        /* [num_rows, width] */
    int32_t *selected;    /* [batch rows, top_k] */
    int64_t heads, head_dim, top_k, width;
    float scale;
    int64_t q_row;                /* the row that q begins with */
    int64_t first_row, num_rows;  /* the rows whose scores are kept */
} index_job;

/* a [n, 16] += weight_h relu(p_jh scale): head h goes to partial sum h mod 16, ascending. */
static void add_heads(const float *p, int n, int heads, const float *weights, float scale, float *a) {
    for (int h = 0; h < heads; h += 16) {
        const int lanes = heads - h < 16 ? heads - h : 16;
        float w[16] = {0};
        for (int l = 0; l < lanes; l++) w[l] = weights[h + l];
        for (int j = 0; j < n; j++) {
            for (int l = 0; l < 16; l++) {
                const float score = p[j * LANES + h + l] * scale;
                a[j * 16 + l] = __builtin_fmaf(w[l], score < 0.0f ? 0.0f : score, a[j * 16 + l]);
            }
        }
    }
}

/* Entries of a row that are scored. */
static int64_t num_scored(const index_job *job, int64_t row) { return entries_seen(job->batch->positions[row], job->plane->stride); }

/* Scores of entries [first, last] of a row. */
static void score_entries(const index_job *job, int64_t row, int64_t first, int64_t last, float *scores) {
    const int64_t hd = job->head_dim, heads = job->heads;
    _Alignas(64) float q[(MOST_INDEX_HEADS + LANES - 1) / LANES][MOST_INDEX_DIM * LANES], keys[BLOCK * MOST_INDEX_DIM], p[BLOCK * LANES];
    _Alignas(64) float a[BLOCK * 16];
    for (int64_t h = 0; h < heads; h += LANES) {
        fill_lanes(job->q + ((row - job->q_row) * heads + h) * hd, hd, (int)(heads - h < LANES ? heads - h : LANES), hd, q[h / LANES]);
    }
    for (int64_t start = first; start <= last; start += BLOCK) {
        const int n = (int)(last - start + 1 < BLOCK ? last - start + 1 : BLOCK);
        for (int j = 0; j < n; j++) get_entry(job->plane, job->batch, row, start + j, keys + j * hd);
        memset(a, 0, sizeof a);
        for (int64_t h = 0; h < heads; h += LANES) {
            const int left = (int)(heads - h < LANES ? heads - h : LANES);
            score_keys(left > 16 ? 2 : 1, keys, n, hd, q[h / LANES], p);
            add_heads(p, n, left, job->weights + row * heads + h, job->scale, a);
        }
        for (int j = 0; j < n; j++) scores[start - first + j] = vf16_sum(vf16_f32(a + j * 16)) + 0.0f; /* -0 becomes 0, and ties with it */
    }
}

static void score_splits(void *arg, int64_t begin, int64_t end) {
    const index_job *job = arg;
    const int64_t splits = (job->width + SPLIT - 1) / SPLIT;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = job->first_row + i / splits, first = i % splits * SPLIT, num = num_scored(job, row);
        const int64_t last = num < first + SPLIT ? num - 1 : first + SPLIT - 1;
        if (num > job->top_k && first <= last) score_entries(job, row, first, last, job->scores + i / splits * job->width + first);
    }
}

/* Numbers in the order of floats; NaN above all. */
static inline uint32_t ordered(float x) {
    const uint32_t u = bits_of(x);
    return u & 0x80000000 ? ~u : u | 0x80000000;
}

/* The smallest of the k largest of n, by its ordered number; `over` is how many of the k are larger. Eleven, eleven and ten
   bits are settled from the top. */
static uint32_t kth_largest(const float *x, int64_t n, int64_t k, int64_t *over) {
    static const int shifts[3] = {21, 10, 0}, most[3] = {2047, 2047, 1023};
    uint32_t found = 0, settled = 0;
    *over = 0;
    for (int i = 0; i < 3; i++) {
        int32_t counts[2048] = {0}, digit = most[i];
        for (int64_t s = 0; s < n; s++) {
            const uint32_t u = ordered(x[s]);
            if ((u & settled) == found) counts[u >> shifts[i] & (uint32_t)most[i]]++;
        }
        for (; *over + counts[digit] < k; digit--) *over += counts[digit];
        found |= (uint32_t)digit << shifts[i], settled |= (uint32_t)most[i] << shifts[i];
    }
    return found;
}

static void select_rows(void *arg, int64_t begin, int64_t end) {
    const index_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = job->first_row + i, num = num_scored(job, row);
        const float *scores = job->scores + i * job->width;
        int32_t *out = job->selected + row * job->top_k;
        int64_t over;
        if (num <= job->top_k) continue;
        const uint32_t least = kth_largest(scores, num, job->top_k, &over);
        int64_t ties = job->top_k - over; /* the lowest entries among those that score the least */
        for (int64_t s = 0; s < num; s++) {
            const uint32_t u = ordered(scores[s]);
            if (u > least || (u == least && ties-- > 0)) *out++ = (int32_t)s;
        }
    }
}

/* Selects for rows [first, first + num), of which `scores` [capacity] keeps as many at once as fit. */
static void index_rows(colibri_context *ctx, index_job *job, int64_t first, int64_t num, int64_t capacity) {
    int64_t most_scored = 0;
    for (int64_t t = first; t < first + num; t++) most_scored = num_scored(job, t) > most_scored ? num_scored(job, t) : most_scored;
    if (most_scored <= job->top_k) return;
    job->width = most_scored;
    const int64_t most = capacity / job->width;
    for (int64_t t = first; t < first + num; t += most) {
        job->first_row = t, job->num_rows = first + num - t < most ? first + num - t : most;
        pool_run(ctx->pool, score_splits, job, job->num_rows * ((job->width + SPLIT - 1) / SPLIT), 1);
        pool_run(ctx->pool, select_rows, job, job->num_rows, 1);
    }
}

#endif
