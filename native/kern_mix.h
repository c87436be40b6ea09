/* Weighted sums of the rows of a matrix for several queries: scores from keys, which lie transposed, and outputs from values.
   out[q][i] = fma(w[q][j], m[j][i], out[q][i]) by ascending j, and nothing else decides the bits of an element. */
#ifndef COLIBRI_KERN_MIX_H
#define COLIBRI_KERN_MIX_H

#include "kern_vec.h"

enum {
    MOST_HEAD_DIM = 512,
    WEIGHT_STRIDE = MOST_HEAD_DIM + 16, /* floats from the weights of one query to those of the next: no power of two, for the sake of caches */
    STREAMS = 4,
    MIX_ROWS = 16,
    MIX_QUERIES = SPAN == 32 ? 8 : 6,   /* that meet a row in registers, each with one span; fewer take more spans */
};

typedef struct {
    const uint8_t *m; /* row 0, column 0 */
    int64_t stride;   /* bytes from row to row */
    int64_t num_rows;
    int64_t begin, end; /* columns */
    const uint8_t *ahead; /* memory of the same size that comes next, asked for while this is used */
    int fresh; /* out starts at zero and is only written; else it lies in spans of the format's own order, see mix_settle */
} mix;

/* One row: S spans of it for Q queries. */
INLINE void mix_row(int format, int Q, int S, const uint8_t *m, const float *w, vspan sum[8][4]) {
    vspan item[4];
    UNROLL for (int s = 0; s < S; s++) item[s] = vspan_load(format, m + s * SPAN * item_size(format));
    UNROLL for (int q = 0; q < Q; q++) {
        const vspan weight = vspan_set1(w[q * WEIGHT_STRIDE]);
        UNROLL for (int s = 0; s < S; s++) sum[q][s] = vspan_fma(weight, item[s], sum[q][s]);
    }
}

/* S spans of columns from `at`, for Q queries; their sums stay in registers. Asks for the lines of what comes next that are as many as are used
   here: into the L2 cache, because few lines can be on their way to the L1 cache at once, and what is used now needs them. Lines are taken
   from STREAMS places in turn: several pages that are read one line after another keep more of them in flight than a single one. */
INLINE void mix_spans(int format, int Q, int S, const mix *x, int64_t at, const float *w, float *const *out) {
    const int64_t size = item_size(format), stride = x->stride, stream_nbytes = (x->end - x->begin) * size * x->num_rows / STREAMS & ~63;
    const uint8_t *m = x->m + at * size, *ahead = x->ahead + ((at - x->begin) * size * x->num_rows / STREAMS & ~63);
    const int lines = MIX_ROWS * S * SPAN * (int)size / 64 / STREAMS;
    vspan sum[8][4];
    UNROLL for (int q = 0; q < Q; q++) {
        UNROLL for (int s = 0; s < S; s++) sum[q][s] = x->fresh ? vspan_zero() : vspan_in(F32_CODE, out[q] + at + s * SPAN);
    }
    int64_t j = 0;
    for (; j + MIX_ROWS <= x->num_rows; j += MIX_ROWS, w += MIX_ROWS) {
        if (x->ahead) {
            UNROLL for (int i = 0; i < lines; i++, ahead += 64) {
                UNROLL for (int k = 0; k < STREAMS; k++) __builtin_prefetch(ahead + k * stream_nbytes, 0, 2);
            }
        }
        for (int i = 0; i < MIX_ROWS; i += 4, m += 4 * stride) {
            UNROLL for (int k = 0; k < 4; k++) mix_row(format, Q, S, m + k * stride, w + i + k, sum);
        }
    }
    for (; j < x->num_rows; j++, m += stride, w++) mix_row(format, Q, S, m, w, sum);
    UNROLL for (int q = 0; q < Q; q++) {
        UNROLL for (int s = 0; s < S; s++) {
            if (x->fresh) vspan_out(format, out[q] + at + s * SPAN, sum[q][s]);
            else vspan_out(F32_CODE, out[q] + at + s * SPAN, sum[q][s]);
        }
    }
}

/* The last columns, at most sixteen. */
INLINE void mix_tail(int format, int Q, const mix *x, int64_t at, const float *w, float *const *out) {
    const int num = x->end - at < 16 ? (int)(x->end - at) : 16;
    const uint8_t *m = x->m + at * item_size(format);
    vf16 sum[8];
    float whole[16];
    for (int q = 0; q < Q; q++) sum[q] = x->fresh ? vf16_zero() : vf16_head(F32_CODE, out[q] + at, num);
    for (int64_t j = 0; j < x->num_rows; j++, m += x->stride) {
        const vf16 item = num == 16 ? vf16_load(format, m) : vf16_head(format, m, num);
        for (int q = 0; q < Q; q++) sum[q] = vf16_fma(vf16_set1(w[q * WEIGHT_STRIDE + j]), item, sum[q]);
    }
    for (int q = 0; q < Q; q++) {
        vf16_store(whole, sum[q]);
        memcpy(out[q] + at, whole, (size_t)num * sizeof *whole);
    }
}

INLINE void mix_queries(int format, int Q, int S, const mix *x, const float *w, float *const *out) {
    int64_t at = x->begin;
    for (; at + S * SPAN <= x->end; at += S * SPAN) mix_spans(format, Q, S, x, at, w, out);
    for (; S > 1 && at + SPAN <= x->end; at += SPAN) mix_spans(format, Q, 1, x, at, w, out);
    for (; at < x->end; at += 16) mix_tail(format, Q, x, at, w, out);
}

INLINE int mix_some(int format, int Q, int S, mix *x, const float **w, float *const **out) {
    mix_queries(format, Q, S, x, *w, *out);
    *w += Q * WEIGHT_STRIDE, *out += Q, x->ahead = NULL;
    return Q;
}

INLINE void mix_of(int format, const mix *all, const float *w, float *const *out, int num) {
    mix x = *all;
    while (num >= MIX_QUERIES) num -= mix_some(format, MIX_QUERIES, 1, &x, &w, &out);
    if (num >= 4) num -= mix_some(format, 4, 1, &x, &w, &out);
    if (num >= 2) num -= mix_some(format, 2, 2, &x, &w, &out);
    if (num > 0) mix_some(format, 1, 64 / SPAN, &x, &w, &out);
}

/* Puts sums [width] that were added to again and again into their usual order. */
static void mix_settle(int format, float *out, int64_t width) {
    if (format != BF16_CODE) return;
    for (int64_t at = 0; at + SPAN <= width; at += SPAN) vspan_out(BF16_CODE, out + at, vspan_in(F32_CODE, out + at));
}

/* For `num` queries. */
static void mix_rows(int format, const mix *x, const float *w, float *const *out, int num) {
    switch (format) {
    case F32_CODE: mix_of(F32_CODE, x, w, out, num); break;
    case F16_CODE: mix_of(F16_CODE, x, w, out, num); break;
    case INT8_ROWS_CODE: mix_of(INT8_ROWS_CODE, x, w, out, num); break;
    default: mix_of(BF16_CODE, x, w, out, num); break;
    }
}

#endif
