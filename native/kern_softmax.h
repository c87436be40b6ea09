/* Scores of a block of keys become weights: a running maximum and sum, powers of two. */
#ifndef COLIBRI_KERN_SOFTMAX_H
#define COLIBRI_KERN_SOFTMAX_H

#include "kern_vec.h"

enum { BLOCK = 64 /* positions */ };

/* A softmax in progress: the largest score so far, the sum of 2^(score - max), and the values weighted likewise. */
typedef struct {
    float max, sum;
    float *o; /* [hd] */
} softmax;

static void multiply_by(const uint8_t *scales, float *p) {
    for (int j = 0; j < BLOCK; j += 16) vf16_store(p + j, vf16_mul(vf16_f32(p + j), vf16_f32(scales + 4 * j)));
}

/* exp2_falling of sixteen, the same bits: spelled out, because compilers turn its clamp into a branch. */
INLINE vf16 vf16_exp2_falling(vf16 x) {
    x = vf16_max(vf16_set1(-125.0f), x);
    const vf16 shifted = vf16_add(x, vf16_set1(ROUND_MAGIC));
    const vf16 r = vf16_sub(x, vf16_sub(shifted, vf16_set1(ROUND_MAGIC)));
    vf16 p = vf16_set1(EXP2_TERMS[0]);
    UNROLL for (int i = 1; i < 7; i++) p = vf16_fma(p, r, vf16_set1(EXP2_TERMS[i]));
    return vf16_mul(p, vf16_power(shifted));
}

/* Places of a block that a query does not see get `hidden`. */
static void hide(float *p, uint64_t seen, float hidden) {
    for (int j = 0; j < BLOCK; j++) p[j] = seen >> j & 1 ? p[j] : hidden;
}

/* Scores [64] become powers of two, of what they are above `max`. */
INLINE void raise_keys(float *p, float max) {
    const vf16 most = vf16_set1(max);
    UNROLL for (int j = 0; j < BLOCK; j += 16) vf16_store(p + j, vf16_exp2_falling(vf16_sub(vf16_f32(p + j), most)));
}

static void scale_floats(float *restrict x, int64_t n, float by) {
    for (int64_t i = 0; i < n; i++) x[i] *= by;
}

/* Scores [64] of one query, of which the places `seen` count, become weights; the rest zero. */
static void weigh_keys(float *p, uint64_t seen, softmax *s, int64_t hd) {
    if (seen != ~0ull) hide(p, seen, -__builtin_inff());
    vf16 most = vf16_set1(s->max);
    for (int j = 0; j < BLOCK; j += 16) most = vf16_max(vf16_f32(p + j), most);
    const float max = vf16_most(most);
    raise_keys(p, max);
    if (seen != ~0ull) hide(p, seen, 0.0f);
    vf16 sums = vf16_f32(p);
    for (int j = 16; j < BLOCK; j += 16) sums = vf16_add(sums, vf16_f32(p + j));
    if (max != s->max) {
        const float keep = exp2_falling(s->max - max);
        s->sum *= keep;
        scale_floats(s->o, hd, keep);
        s->max = max;
    }
    s->sum += vf16_sum(sums);
}

/* Combines the next split into what the splits before it found; one of which nothing is seen changes nothing. */
static void combine(softmax *all, const softmax *next, int64_t hd) {
    if (next->max == -__builtin_inff()) return;
    const float max = next->max > all->max ? next->max : all->max;
    const float a = exp2_falling(all->max - max), b = exp2_falling(next->max - max);
    all->sum = __builtin_fmaf(next->sum, b, all->sum * a);
    for (int64_t d = 0; d < hd; d++) all->o[d] = __builtin_fmaf(next->o[d], b, all->o[d] * a);
    all->max = max;
}

#endif
