/* Dot products with row-major float weights where there are sixteen registers of eight floats (AVX2). The order of additions is that of
   kern_float.h and kern_fp8.h. For several inputs, some columns of eight rows are widened to floats and then meet all of them. */
#ifndef COLIBRI_KERN_WIDENED_H
#define COLIBRI_KERN_WIDENED_H

#include "kern_vec.h"

#if WIDEN_FIRST

enum {
    WIDENED = 256,        /* columns at a time */
    APART = WIDENED + 16, /* floats from row to row: no power of two, for the sake of caches */
    MOST_ROWS = 8,
    MOST_INPUTS = 8,
    WIDENED_FROM = 4, /* inputs: fewer are done in registers alone */
};

typedef float widened_sums[16]; /* of one row and one input */

typedef struct {
    float items[MOST_ROWS][APART];
    widened_sums sums[MOST_INPUTS][MOST_ROWS];
    float padded[MOST_INPUTS][APART]; /* the last columns of inputs, followed by zeros */
    const float *x[MOST_INPUTS];
} __attribute__((aligned(64))) widened;

/* Points at the columns [begin, end) of n inputs; returns how many there are, with the zeros that make whole sixteens. */
static int64_t widened_inputs(widened *m, const float *const *x, int n, int64_t begin, int64_t end) {
    const int64_t len = end - begin, whole = (len + 15) / 16 * 16;
    for (int i = 0; i < n; i++) {
        m->x[i] = x[i] + begin;
        if (len == whole) continue;
        memset(m->padded[i], 0, sizeof m->padded[i]);
        memcpy(m->padded[i], x[i] + begin, (size_t)len * sizeof(float));
        m->x[i] = m->padded[i];
    }
    return whole;
}

/* sums[n][r] += R rows of floats times N inputs, over `len` columns, a multiple of 16. Where `scale` is given, they are the columns of one
   block of fp8, read as 2^-8 of what they are. */
INLINE void widened_tile(int R, int N, const float *w, const float *const *x, int64_t len, const float *scale, widened_sums (*sums)[MOST_ROWS]) {
    vf8 sum[3][2][2];
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int n = 0; n < N; n++) {
            UNROLL for (int h = 0; h < 2; h++) sum[r][n][h] = scale ? vf8_zero() : vf8_floats(sums[n][r] + 8 * h);
        }
    }
    for (int64_t k = 0; k < len; k += 16) {
        UNROLL for (int h = 0; h < 2; h++) {
            vf8 xs[2];
            UNROLL for (int n = 0; n < N; n++) xs[n] = vf8_floats(x[n] + k + 8 * h);
            UNROLL for (int r = 0; r < R; r++) {
                vf8 ws = vf8_floats(w + r * APART + k + 8 * h);
                KEEP(ws); /* or each of its uses would load it again */
                UNROLL for (int n = 0; n < N; n++) sum[r][n][h] = vf8_fma(ws, xs[n], sum[r][n][h]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int n = 0; n < N; n++) {
            UNROLL for (int h = 0; h < 2; h++) {
                float *to = sums[n][r] + 8 * h;
                if (scale) sum[r][n][h] = vf8_fma(vf8_mul(sum[r][n][h], vf8_set1(256.0f)), vf8_set1(*scale), vf8_floats(to));
                vf8_store(to, sum[r][n][h]);
            }
        }
    }
}

INLINE void widened_tiles(int N, const float *w, int rows, const float *const *x, int64_t len, const float *scale, widened_sums (*sums)[MOST_ROWS]) {
    int r = 0;
    for (; r + 3 <= rows; r += 3) widened_tile(3, N, w + r * APART, x, len, scale, (widened_sums(*)[MOST_ROWS])(sums[0] + r));
    for (; r + 2 <= rows; r += 2) widened_tile(2, N, w + r * APART, x, len, scale, (widened_sums(*)[MOST_ROWS])(sums[0] + r));
    if (r < rows) widened_tile(1, N, w + r * APART, x, len, scale, (widened_sums(*)[MOST_ROWS])(sums[0] + r));
}

/* All that was widened times all inputs: two of them meet all rows before the next, because rows of x are often a power of two apart, and
   then get into each other's way in the cache. */
INLINE void widened_times(widened *m, int rows, int num, int64_t len, const float *scale) {
    int n = 0;
    for (; n + 2 <= num; n += 2) widened_tiles(2, m->items[0], rows, m->x + n, len, scale, m->sums + n);
    if (n < num) widened_tiles(1, m->items[0], rows, m->x + n, len, scale, m->sums + n);
}

static __attribute__((noinline)) void widened_add(widened *m, int rows, int num, int64_t len) { widened_times(m, rows, num, len, NULL); }

static __attribute__((noinline)) void widened_add_block(widened *m, int rows, int num, int64_t len, float scale) {
    widened_times(m, rows, num, len, &scale);
}

static void widened_out(const widened *m, int rows, int n, float *out, int64_t ld) {
    for (int i = 0; i < n; i++) {
        for (int r = 0; r < rows; r++) out[i * ld + r] = vf16_sum(vf16_f32(m->sums[i][r]));
    }
}

static void widened_zero(widened *m, int n) { memset(m->sums, 0, (size_t)n * sizeof *m->sums); }

/* One row's items from column 0 on, `len` of them and zeros up to `whole`. */
INLINE void widen_items(int format, const uint8_t *items, int64_t len, int64_t whole, float *out) {
    int64_t k = 0;
    for (; k + 16 <= len; k += 16) vf16_store(out + k, vf16_load(format, items + k * item_size(format)));
    if (k < whole) vf16_store(out + k, vf16_head(format, items + k * item_size(format), (int)(len - k)));
}

/* See float_rows; n <= MOST_INPUTS, rows <= MOST_ROWS. */
INLINE void widened_float_rows(int format, const uint8_t *w, int64_t stride, int rows, const float *const *x, int n, int64_t K, float *out,
                               int64_t ld) {
    const int64_t size = item_size(format), ahead = stripes_ahead((rows - 1) * stride);
    const uint8_t *asked = w;
    widened m;
    widened_zero(&m, n);
    for (int64_t begin = 0; begin < K; begin += WIDENED) {
        const int64_t end = begin + WIDENED < K ? begin + WIDENED : K, whole = widened_inputs(&m, x, n, begin, end);
        for (int r = 0; r < rows; r++) {
            for (int64_t k = 0; k < WIDENED * size; k += ASKED_NBYTES, asked += ASKED_NBYTES) ask_ahead(asked, ahead);
            widen_items(format, w + r * stride + begin * size, end - begin, whole, m.items[r]);
        }
        widened_add(&m, rows, n, whole);
    }
    widened_out(&m, rows, n, out, ld);
}

/* Codes of one row as floats, 2^-8 of what they are; returns whether one is NaN. */
static int widen_fp8(const uint8_t *codes, int64_t len, int64_t whole, float *out) {
    const fp8_constants c = fp8_constants_of();
    vb64 most = vb64_zero();
    int64_t k = 0;
    for (; k + 32 <= len; k += 32) {
        if (__builtin_expect(vb64_any_strange(vb64_strange(vb64_zero(), codes + k)), 0)) {
            most = vb64_most_16(vb64_most_16(most, codes + k), codes + k + 16);
            vf16_store(out + k, vf16_fp8(codes + k));
            vf16_store(out + k + 16, vf16_fp8(codes + k + 16));
        } else {
            vf16_store(out + k, vf16_fp8_normal(&c, codes + k));
            vf16_store(out + k + 16, vf16_fp8_normal(&c, codes + k + 16));
        }
    }
    for (; k < whole; k += 16) {
        uint8_t rest[16] = {0};
        memcpy(rest, codes + k, (size_t)(len - k < 16 ? len - k : 16));
        most = vb64_most_16(most, rest);
        vf16_store(out + k, vf16_fp8(rest));
    }
    return vb64_any_nan(most);
}

/* See fp8_rows; n <= MOST_INPUTS, rows <= MOST_ROWS; `scales` are those of the rows' block. */
static void widened_fp8_rows(const uint8_t *w, const uint8_t *scales, int64_t block, int rows, const float *const *x, int n, int64_t K,
                             float *out, int64_t ld) {
    const int64_t ahead = stripes_ahead((rows - 1) * K);
    const uint8_t *asked = w;
    int is_nan[MOST_ROWS] = {0};
    widened m;
    widened_zero(&m, n);
    for (int64_t begin = 0; begin < K; begin += block, scales += 4) {
        const int64_t end = begin + block < K ? begin + block : K, whole = widened_inputs(&m, x, n, begin, end);
        float scale;
        memcpy(&scale, scales, sizeof scale);
        for (int r = 0; r < rows; r++) {
            if (begin % ASKED_NBYTES == 0) ask_ahead(asked, ahead), asked += ASKED_NBYTES;
            is_nan[r] |= widen_fp8(w + r * K + begin, end - begin, whole, m.items[r]);
        }
        widened_add_block(&m, rows, n, whole, scale);
    }
    widened_out(&m, rows, n, out, ld);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < n && is_nan[r]; i++) out[i * ld + r] = float_of(0x7fc00000);
    }
}

/* The sum of one row's codes times x, and whether one of them is NaN. */
static __attribute__((noinline)) int fp8_strange_sum(const uint8_t *codes, const float *x, int64_t len, float sums[16]) {
    vb64 most = vb64_zero();
    vf16 sum = vf16_zero();
    int64_t k = 0;
    for (; k + 16 <= len; k += 16) {
        most = vb64_most_16(most, codes + k);
        sum = vf16_fma(vf16_fp8(codes + k), vf16_f32(x + k), sum);
    }
    if (k < len) {
        uint8_t rest[16] = {0};
        memcpy(rest, codes + k, (size_t)(len - k));
        most = vb64_most_16(most, rest);
        sum = vf16_fma(vf16_fp8(rest), vf16_head(F32_CODE, x + k, (int)(len - k)), sum);
    }
    vf16_store(sums, sum);
    return vb64_any_nan(most);
}

/* sum[r] = one block of R rows, of 32 columns or a multiple, times x; returns whether a code is strange, so that it must be done again. */
INLINE int fp8_normal_sums(int R, const fp8_constants *c, const uint8_t *w, int64_t K, const float *x, int64_t len, vf16 sum[2]) {
    vb64 strange = vb64_zero();
    UNROLL for (int r = 0; r < R; r++) sum[r] = vf16_zero();
    for (int64_t k = 0; k < len; k += 32) {
        UNROLL for (int r = 0; r < R; r++) strange = vb64_strange(strange, w + r * K + k);
        UNROLL for (int i = 0; i < 32; i += 16) {
            UNROLL for (int r = 0; r < R; r++) sum[r] = vf16_fma(vf16_fp8_normal(c, w + r * K + k + i), vf16_f32(x + k + i), sum[r]);
        }
    }
    return vb64_any_strange(strange);
}

/* out[r]: R rows of one block times one input. */
INLINE void fp8_direct(int R, const uint8_t *w, const uint8_t *scales, int64_t block, const float *x, int64_t K, float *out) {
    const int64_t ahead = stripes_ahead((R - 1) * K);
    const fp8_constants c = fp8_constants_of();
    const uint8_t *asked = w;
    int is_nan[2] = {0};
    vf16 acc[2] = {vf16_zero(), vf16_zero()};
    for (int64_t begin = 0; begin < K; begin += block, scales += 4) {
        const int64_t len = begin + block < K ? block : K - begin;
        vf16 sum[2];
        UNROLL for (int r = 0; r < R; r++) {
            if (begin % ASKED_NBYTES == 0) ask_ahead(asked, ahead), asked += ASKED_NBYTES;
        }
        if (__builtin_expect(len % 32 || fp8_normal_sums(R, &c, w + begin, K, x + begin, len, sum), 0)) {
            UNROLL for (int r = 0; r < R; r++) {
                float sums[16];
                is_nan[r] |= fp8_strange_sum(w + r * K + begin, x + begin, len, sums);
                sum[r] = vf16_f32(sums);
            }
        }
        float scale;
        memcpy(&scale, scales, sizeof scale);
        UNROLL for (int r = 0; r < R; r++) acc[r] = vf16_fma(vf16_mul(sum[r], vf16_set1(256.0f)), vf16_set1(scale), acc[r]);
    }
    UNROLL for (int r = 0; r < R; r++) out[r] = is_nan[r] ? float_of(0x7fc00000) : vf16_sum(acc[r]);
}

static void fp8_direct_rows(const uint8_t *w, const uint8_t *scales, int64_t block, int rows, const float *x, int64_t K, float *out) {
    int r = 0;
    for (; r + 2 <= rows; r += 2) fp8_direct(2, w + r * K, scales, block, x, K, out + r);
    if (r < rows) fp8_direct(1, w + r * K, scales, block, x, K, out + r);
}

#endif
#endif
