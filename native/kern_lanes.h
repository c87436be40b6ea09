/* Attention of many heads over keys that they share: a lane of a vector is a head, so that a key is read and widened once
   for up to LANES heads, and nothing is summed across lanes. Keys [n, width] are floats; values are their first numbers. */
#ifndef COLIBRI_KERN_LANES_H
#define COLIBRI_KERN_LANES_H

#include "kern_attend.h"

enum { LANES = 32 };
#define UNROLLED _Pragma("GCC unroll 32") /* registers: 24 turns are more than the compiler unrolls by itself */

/* Keys, or numbers of a value, that are summed in registers for TILE_LANES vectors of heads. */
#ifdef VEC_AVX512
enum { LANE_ROWS = 12, TILE_LANES = 2 };
#else
enum { LANE_ROWS = 6, TILE_LANES = 1 };
#endif

/* How many of `left` rows go at once: no fewer than four as long as that is possible. */
INLINE int64_t rows_at_once(int64_t left) {
    if (left >= LANE_ROWS && (left - LANE_ROWS >= 4 || left % LANE_ROWS != 2)) return LANE_ROWS;
    return left >= 4 ? 4 : 1;
}

/* p[j][l] += k_j . q_l over `num` of their numbers ascending, for J keys and V vectors of lanes. */
INLINE void score_tile(int J, int V, const float *keys, int64_t width, int64_t num, const float *q, float *p) {
    vf16 acc[LANE_ROWS][2];
    UNROLLED
    for (int j = 0; j < J; j++) {
        UNROLLED for (int v = 0; v < V; v++) acc[j][v] = vf16_f32(p + j * LANES + 16 * v);
    }
    for (int64_t i = 0; i < num; i++) {
        vf16 qs[2];
        UNROLLED for (int v = 0; v < V; v++) qs[v] = vf16_f32(q + i * LANES + 16 * v);
        UNROLLED
        for (int j = 0; j < J; j++) {
            const vf16 key = vf16_set1(keys[j * width + i]);
            UNROLLED for (int v = 0; v < V; v++) acc[j][v] = vf16_fma(key, qs[v], acc[j][v]);
        }
    }
    UNROLLED
    for (int j = 0; j < J; j++) {
        UNROLLED for (int v = 0; v < V; v++) vf16_store(p + j * LANES + 16 * v, acc[j][v]);
    }
}

INLINE void score_tiles(int V, const float *keys, int n, int64_t width, int64_t num, const float *q, float *p) {
    for (int64_t j = 0, rows; j < n; j += rows) {
        rows = rows_at_once(n - j);
        if (rows == LANE_ROWS) score_tile(LANE_ROWS, V, keys + j * width, width, num, q, p + j * LANES);
        else if (rows == 4) score_tile(4, V, keys + j * width, width, num, q, p + j * LANES);
        else score_tile(1, V, keys + j * width, width, num, q, p + j * LANES);
    }
}

/* SCORED numbers of all keys and queries at a time, which an L1 cache holds. */
INLINE void score_all(int V, const float *keys, int n, int64_t width, const float *q, float *p) {
    enum { SCORED = 64 };
    memset(p, 0, (size_t)(n * LANES) * sizeof *p);
    for (int64_t i = 0; i < width; i += SCORED) {
        const int64_t num = width - i < SCORED ? width - i : SCORED;
        for (int v = 0; v < V; v += TILE_LANES) {
            const float *part = q + i * LANES + 16 * v;
            if (V - v < TILE_LANES) score_tiles(1, keys + i, n, width, num, part, p + 16 * v);
            else score_tiles(TILE_LANES, keys + i, n, width, num, part, p + 16 * v);
        }
    }
}

/* p [n, LANES] = the scores of n keys with the lanes of q [width, LANES]. */
static void score_keys(int vectors, const float *keys, int n, int64_t width, const float *q, float *p) {
    if (vectors == 1) score_all(1, keys, n, width, q, p);
    else score_all(2, keys, n, width, q, p);
}

/* o[d][l] = o[d][l] keep_l, then fma(p_jl, v_jd, o) by ascending j, for D numbers of the value. */
INLINE void value_tile(int D, int V, const float *values, int n, int64_t width, const float *p, const float *keep, float *o) {
    vf16 acc[LANE_ROWS][2];
    UNROLLED
    for (int d = 0; d < D; d++) {
        UNROLLED for (int v = 0; v < V; v++) acc[d][v] = vf16_mul(vf16_f32(o + d * LANES + 16 * v), vf16_f32(keep + 16 * v));
    }
    for (int j = 0; j < n; j++) {
        vf16 weights[2];
        UNROLLED for (int v = 0; v < V; v++) weights[v] = vf16_f32(p + j * LANES + 16 * v);
        UNROLLED
        for (int d = 0; d < D; d++) {
            const vf16 value = vf16_set1(values[j * width + d]);
            UNROLLED for (int v = 0; v < V; v++) acc[d][v] = vf16_fma(value, weights[v], acc[d][v]);
        }
    }
    UNROLLED
    for (int d = 0; d < D; d++) {
        UNROLLED for (int v = 0; v < V; v++) vf16_store(o + d * LANES + 16 * v, acc[d][v]);
    }
}

INLINE void value_some(int64_t D, int V, const float *values, int n, int64_t width, const float *p, const float *keep, float *o) {
    if (D == LANE_ROWS) value_tile(LANE_ROWS, V, values, n, width, p, keep, o);
    else if (D == 4) value_tile(4, V, values, n, width, p, keep, o);
    else value_tile(1, V, values, n, width, p, keep, o);
}

INLINE void value_all(int V, const float *values, int n, int64_t width, int64_t dims, const float *p, const float *keep, float *o) {
    for (int64_t d = 0, some; d < dims; d += some) {
        some = rows_at_once(dims - d);
        for (int v = 0; v < V; v += TILE_LANES) {
            const int64_t at = d * LANES + 16 * v;
            if (V - v < TILE_LANES) value_some(some, 1, values + d, n, width, p + 16 * v, keep + 16 * v, o + at);
            else value_some(some, TILE_LANES, values + d, n, width, p + 16 * v, keep + 16 * v, o + at);
        }
    }
}

/* Softmaxes in progress, one a lane; see `softmax`. */
typedef struct {
    float max[LANES], sum[LANES];
    float *o; /* [dims, LANES] */
} softmaxes;

static void begin_softmaxes(softmaxes *s, int64_t dims) {
    for (int l = 0; l < LANES; l++) s->max[l] = -__builtin_inff(), s->sum[l] = 0.0f;
    memset(s->o, 0, (size_t)(dims * LANES) * sizeof *s->o);
}

/* Scores p [n, LANES] become weights; `keep` is what is left of the sums so far. */
INLINE void weigh_lanes(int lanes, float scale, int n, float *p, softmaxes *s, float *keep) {
    float max[LANES], sum[LANES];
    for (int l = 0; l < lanes; l++) max[l] = s->max[l];
    for (int j = 0; j < n; j++) {
        for (int l = 0; l < lanes; l++) {
            const float score = p[j * LANES + l] * scale;
            p[j * LANES + l] = score;
            max[l] = score > max[l] ? score : max[l];
        }
    }
    for (int l = 0; l < lanes; l++) keep[l] = exp_f32(s->max[l] - max[l]), sum[l] = 0.0f;
    for (int j = 0; j < n; j++) {
        for (int l = 0; l < lanes; l++) {
            p[j * LANES + l] = exp_f32(p[j * LANES + l] - max[l]);
            sum[l] += p[j * LANES + l];
        }
    }
    for (int l = 0; l < lanes; l++) s->sum[l] = __builtin_fmaf(s->sum[l], keep[l], sum[l]), s->max[l] = max[l];
}

/* Takes in n <= BLOCK keys; p [BLOCK, LANES] is scratch. */
static void attend_keys(int vectors, float scale, const float *keys, int n, int64_t width, int64_t dims, const float *q, float *p, softmaxes *s) {
    float keep[LANES];
    score_keys(vectors, keys, n, width, q, p);
    if (vectors == 1) {
        weigh_lanes(16, scale, n, p, s, keep);
        value_all(1, keys, n, width, dims, p, keep, s->o);
    } else {
        weigh_lanes(LANES, scale, n, p, s, keep);
        value_all(2, keys, n, width, dims, p, keep, s->o);
    }
}

/* Combines the next split into what the splits before it found. */
static void combine_lanes(softmaxes *all, const softmaxes *next, int64_t dims) {
    float a[LANES], b[LANES];
    for (int l = 0; l < LANES; l++) {
        const float max = next->max[l] > all->max[l] ? next->max[l] : all->max[l];
        a[l] = exp_f32(all->max[l] - max), b[l] = exp_f32(next->max[l] - max);
        all->sum[l] = __builtin_fmaf(next->sum[l], b[l], all->sum[l] * a[l]);
        all->max[l] = max;
    }
    for (int64_t d = 0; d < dims; d++) {
        for (int l = 0; l < LANES; l++) {
            all->o[d * LANES + l] = __builtin_fmaf(next->o[d * LANES + l], b[l], all->o[d * LANES + l] * a[l]);
        }
    }
}

/* q [width, LANES] from `heads` rows that lie `stride` floats apart; further lanes are zero. */
static void fill_lanes(const float *rows, int64_t stride, int heads, int64_t width, float *q) {
    for (int64_t i = 0; i < width; i += 16) { /* so that what is written stays in the L1 cache */
        const int64_t end = i + 16 < width ? i + 16 : width;
        for (int l = 0; l < heads; l++) {
            for (int64_t k = i; k < end; k++) q[k * LANES + l] = rows[l * stride + k];
        }
        for (int64_t k = i; k < end; k++) {
            for (int l = heads; l < LANES; l++) q[k * LANES + l] = 0.0f;
        }
    }
}

/* The weights are made to add up to one; rows of `heads` lanes, `stride` floats apart, get what was found. */
static void finish_lanes(softmaxes *s, int heads, int64_t dims, float *rows, int64_t stride) {
    for (int64_t d = 0; d < dims; d++) {
        for (int l = 0; l < LANES; l++) s->o[d * LANES + l] /= s->sum[l];
    }
    for (int64_t i = 0; i < dims; i += 16) {
        const int64_t end = i + 16 < dims ? i + 16 : dims;
        for (int l = 0; l < heads; l++) {
            for (int64_t d = i; d < end; d++) rows[l * stride + d] = s->o[d * LANES + l];
        }
    }
}

#endif
