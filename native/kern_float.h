/* Dot products with row-major float weights.
   Element k goes to partial sum k mod 16 by fma, ascending; the sixteen are added in a fixed tree. */
#ifndef COLIBRI_KERN_FLOAT_H
#define COLIBRI_KERN_FLOAT_H

#include "kern_vec.h"
#include "kern_widened.h"

#ifdef __AVX512F__
enum { TILE_ROWS = 4, TILE_TOKENS = 4 };
#else
enum { TILE_ROWS = 2, TILE_TOKENS = 2 };
#endif

/* R rows `stride` bytes apart from w, N inputs; out[n * ld + r] = w_r . x_n over k < K. R and N are constants where it is called. */
INLINE void float_tile(int format, int R, int N, const uint8_t *w, int64_t stride, const float *const *x, int64_t K, float *out,
                       int64_t ld) {
    const int size = item_size(format), asked_every = ASKED_NBYTES / size;
    const int64_t ahead = stripes_ahead((R - 1) * stride);
    const uint8_t *asked = w; /* in line, whatever the order of use: the rows follow each other */
    vf16 acc[4][4];
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int n = 0; n < N; n++) acc[r][n] = vf16_zero();
    }
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) {
        vf16 xs[4];
        UNROLL for (int n = 0; n < N; n++) xs[n] = vf16_f32(x[n] + k);
        if (stride && k % asked_every == 0) {
            UNROLL for (int r = 0; r < R; r++, asked += ASKED_NBYTES) ask_ahead(asked, ahead);
        }
        UNROLL for (int r = 0; r < R; r++) {
            const vf16 ws = vf16_load(format, w + r * stride + k * size);
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = vf16_fma(ws, xs[n], acc[r][n]);
        }
    }
    if (k < K) {
        UNROLL for (int r = 0; r < R; r++) {
            const vf16 ws = vf16_head(format, w + r * stride + k * size, (int)(K - k));
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = vf16_fma(ws, vf16_head(F32_CODE, x[n] + k, (int)(K - k)), acc[r][n]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int n = 0; n < N; n++) out[n * ld + r] = vf16_sum(acc[r][n]);
    }
}

INLINE void float_rows_n(int format, int B, int N, const uint8_t *w, int64_t stride, int rows, const float *const *x, int64_t K,
                         float *out, int64_t ld) {
    int r = 0;
    for (; r + B <= rows; r += B) float_tile(format, B, N, w + r * stride, stride, x, K, out + r, ld);
    for (; r < rows; r++) float_tile(format, 1, N, w + r * stride, stride, x, K, out + r, ld);
}

INLINE void float_rows_of(int format, const uint8_t *w, int64_t stride, int rows, const float *const *x, int n, int64_t K, float *out,
                          int64_t ld) {
#if WIDEN_FIRST
    if (n >= WIDENED_FROM) {
        for (int r = 0; r < rows; r += MOST_ROWS) {
            const int num = rows - r < MOST_ROWS ? rows - r : MOST_ROWS;
            widened_float_rows(format, w + r * stride, stride, num, x, n, K, out + r, ld);
        }
        return;
    }
#endif
    for (; n >= TILE_TOKENS; n -= TILE_TOKENS, x += TILE_TOKENS, out += TILE_TOKENS * ld) {
        float_rows_n(format, TILE_ROWS, TILE_TOKENS, w, stride, rows, x, K, out, ld);
    }
    for (; n > 0; n--, x++, out += ld) float_rows_n(format, 4, 1, w, stride, rows, x, K, out, ld);
}

/* out[i * ld + r] = row r of w (rows `stride` bytes apart) times x[i], for `rows` rows and n inputs. */
static void float_rows(int format, const uint8_t *w, int64_t stride, int rows, const float *const *x, int n, int64_t K, float *out,
                       int64_t ld) {
    switch (format) {
    case F32_CODE: float_rows_of(F32_CODE, w, stride, rows, x, n, K, out, ld); break;
    case F16_CODE: float_rows_of(F16_CODE, w, stride, rows, x, n, K, out, ld); break;
    case INT8_ROWS_CODE: float_rows_of(INT8_ROWS_CODE, w, stride, rows, x, n, K, out, ld); break;
    default: float_rows_of(BF16_CODE, w, stride, rows, x, n, K, out, ld); break;
    }
}

/* Widens n items to floats. */
static void widen(int format, const uint8_t *items, int64_t n, float *out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vf16_store(out + i, vf16_load(format, items + i * item_size(format)));
    if (i < n) {
        float rest[16];
        vf16_store(rest, vf16_head(format, items + i * item_size(format), (int)(n - i)));
        memcpy(out + i, rest, (size_t)(n - i) * sizeof *rest);
    }
}

/* Rounds n floats to the items of f32, f16 or bf16. */
static void narrow(int format, const float *x, int64_t n, uint8_t *items) {
    if (format == F32_CODE) {
        memcpy(items, x, (size_t)n * sizeof *x);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const uint16_t item = format == F16_CODE ? float_to_half(x[i]) : float_to_bf16(x[i]);
        memcpy(items + 2 * i, &item, sizeof item);
    }
}

/* A row as 8-bit codes of one scale: q = rint(x * (127 / max)), scale = max / 127; NaN where x is not finite. */
static float narrow_row(const float *x, int64_t n, uint8_t *codes) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) most = (bits_of(x[i]) & 0x7fffffff) > most ? bits_of(x[i]) & 0x7fffffff : most;
    const float max = float_of(most), factor = most < 0x7f800000 && max > 1e-30f ? 127.0f / max : 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const float shifted = (factor == 0.0f ? 0.0f : x[i] * factor) + ROUND_MAGIC;
        codes[i] = (uint8_t)(bits_of(shifted) - bits_of(ROUND_MAGIC));
    }
    return most >= 0x7f800000 ? float_of(0x7fc00000) : factor == 0.0f ? 0.0f : max / 127.0f;
}

/* The square root of sum(x^2) / divisor + eps, in the order of a dot product. */
static float root_of_squares(const float *x, int64_t n, float divisor, float eps) {
    float sum;
    const float *const rows[1] = {x};
    float_tile(F32_CODE, 1, 1, (const uint8_t *)x, 0, rows, n, &sum, 1);
    return __builtin_sqrtf(sum / divisor + eps);
}

static float root_mean_square(const float *x, int64_t n, float eps) { return root_of_squares(x, n, (float)n, eps); }

static void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *out) {
    const float scale = 1.0f / root_mean_square(x, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* (x - mean) / sqrt(var + eps) * weight + bias; sums in the order of a dot product. out may be x. */
static void layer_norm(const float *x, const float *weight, const float *bias, float eps, int64_t n, float *out) {
    vf16 sums = vf16_zero();
    for (int64_t i = 0; i < n; i += 16) sums = vf16_add(sums, vf16_head(F32_CODE, x + i, n - i < 16 ? (int)(n - i) : 16));
    const float mean = vf16_sum(sums) / (float)n;
    for (int64_t i = 0; i < n; i++) out[i] = x[i] - mean;
    const float scale = 1.0f / root_mean_square(out, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = __builtin_fmaf(out[i] * scale, weight[i], bias[i]);
}

/* Turns `half` pairs of a head: (a, b) -> (a cos - b sin, b cos + a sin); i is paired with half + i, or 2i with 2i + 1. */
static void rope_row(int pairs, int64_t half, const float *cos, const float *sin, float *x) {
    const int64_t apart = pairs ? 1 : half, step = pairs ? 2 : 1;
    for (int64_t i = 0; i < half; i++) {
        float *p = x + i * step;
        const float a = p[0], b = p[apart];
        p[0] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        p[apart] = __builtin_fmaf(b, cos[i], a * sin[i]);
    }
}

#endif
