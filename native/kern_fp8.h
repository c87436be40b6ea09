/* Dot products with row-major E4M3 weights: one byte each, and a float32 scale for each square block (formats/fp8.py).
   Within a block as in kern_float.h; then all sixteen sums become acc = fma(sum, scale, acc), by ascending block. */
#ifndef COLIBRI_KERN_FP8_H
#define COLIBRI_KERN_FP8_H

#include "kern_float.h"

INLINE int64_t fp8_block(int format) { return 128 >> (2 * (format & 1) + (format >> 1 & 1)); }

/* Where the scales [N / block, K / block] follow the codes. */
static inline int64_t fp8_scales_at(int64_t N, int64_t K) { return (N * K + 3) / 4 * 4; }

static inline int64_t fp8_nbytes(int64_t N, int64_t K, int64_t block) {
    return fp8_scales_at(N, K) + (N + block - 1) / block * ((K + block - 1) / block) * 4;
}

#if !WIDEN_FIRST
/* R rows of one block times N inputs; out[n * ld + r]. R and N are constants where it is called. */
INLINE void fp8_tile(int R, int N, const uint8_t *w, const uint8_t *scales, int64_t block, const float *const *x, int64_t K, float *out,
                     int64_t ld) {
    const int64_t ahead = stripes_ahead((R - 1) * K);
    const uint8_t *asked = w;
    vf16 acc[4][4];
    vb64 most[4];
    UNROLL for (int r = 0; r < R; r++) {
        most[r] = vb64_zero();
        UNROLL for (int n = 0; n < N; n++) acc[r][n] = vf16_zero();
    }
    for (int64_t begin = 0; begin < K; begin += block, scales += 4) {
        const int64_t end = begin + block < K ? begin + block : K, whole = begin + (end - begin) / 64 * 64;
        vf16 sum[4][4];
        UNROLL for (int r = 0; r < R; r++) {
            if (begin % ASKED_NBYTES == 0) ask_ahead(asked, ahead), asked += ASKED_NBYTES;
            UNROLL for (int n = 0; n < N; n++) sum[r][n] = vf16_zero();
        }
        int64_t k = begin;
        for (; k < whole; k += 64) {
            UNROLL for (int r = 0; r < R; r++) {
                const uint8_t *codes = w + r * K + k;
                vf16 ws[4];
                vf16_fp8_four(codes, ws);
                most[r] = vb64_most(most[r], codes);
                UNROLL for (int i = 0; i < 4; i++) {
                    UNROLL for (int n = 0; n < N; n++) sum[r][n] = vf16_fma(ws[i], vf16_f32(x[n] + k + 16 * i), sum[r][n]);
                }
            }
        }
        for (; k + 16 <= end; k += 16) {
            UNROLL for (int r = 0; r < R; r++) {
                const vf16 ws = vf16_fp8(w + r * K + k);
                most[r] = vb64_most_16(most[r], w + r * K + k);
                UNROLL for (int n = 0; n < N; n++) sum[r][n] = vf16_fma(ws, vf16_f32(x[n] + k), sum[r][n]);
            }
        }
        if (k < end) {
            UNROLL for (int r = 0; r < R; r++) {
                uint8_t codes[16] = {0};
                memcpy(codes, w + r * K + k, (size_t)(end - k));
                most[r] = vb64_most_16(most[r], codes);
                UNROLL for (int n = 0; n < N; n++) {
                    sum[r][n] = vf16_fma(vf16_fp8(codes), vf16_head(F32_CODE, x[n] + k, (int)(end - k)), sum[r][n]);
                }
            }
        }
        float scale;
        memcpy(&scale, scales, sizeof scale);
        UNROLL for (int r = 0; r < R; r++) { /* the codes were read as 2^-8 of what they are */
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = vf16_fma(vf16_mul(sum[r][n], vf16_set1(256.0f)), vf16_set1(scale), acc[r][n]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        const int is_nan = vb64_any_nan(most[r]);
        UNROLL for (int n = 0; n < N; n++) out[n * ld + r] = is_nan ? float_of(0x7fc00000) : vf16_sum(acc[r][n]);
    }
}

/* For one input, four rows at a time: the sum of one row waits for its last addition. */
INLINE void fp8_rows_n(int B, int N, const uint8_t *w, const uint8_t *scales, int64_t block, int rows, const float *const *x, int64_t K,
                       float *out, int64_t ld) {
    int r = 0;
    for (; r + B <= rows; r += B) fp8_tile(B, N, w + r * K, scales, block, x, K, out + r, ld);
    for (; r < rows; r++) fp8_tile(1, N, w + r * K, scales, block, x, K, out + r, ld);
}

#endif

/* out[i * ld + r] = row first + r of the matrix [N, K] at `data` times x[i], for `rows` rows of one block and n inputs. */
static void fp8_rows(const uint8_t *data, int64_t N, int64_t K, int64_t block, int64_t first, int rows, const float *const *x, int n,
                     float *out, int64_t ld) {
    const uint8_t *scales = data + fp8_scales_at(N, K) + first / block * ((K + block - 1) / block) * 4, *w = data + first * K;
#if WIDEN_FIRST
    if (n >= WIDENED_FROM) {
        widened_fp8_rows(w, scales, block, rows, x, n, K, out, ld);
        return;
    }
    for (; n > 0; n--, x++, out += ld) fp8_direct_rows(w, scales, block, rows, x[0], K, out);
#else
    for (; n >= TILE_TOKENS; n -= TILE_TOKENS, x += TILE_TOKENS, out += TILE_TOKENS * ld) {
        fp8_rows_n(2, TILE_TOKENS, w, scales, block, rows, x, K, out, ld);
    }
    for (; n > 0; n--, x++, out += ld) fp8_rows_n(4, 1, w, scales, block, rows, x, K, out, ld);
#endif
}

/* Row `row` as floats. */
static void fp8_widen(const uint8_t *data, int64_t N, int64_t K, int64_t block, int64_t row, float *out) {
    const uint8_t *codes = data + row * K, *scales = data + fp8_scales_at(N, K) + row / block * ((K + block - 1) / block) * 4;
    for (int64_t k = 0; k < K; k++) {
        float value[16], scale;
        uint8_t items[16] = {codes[k]};
        vf16_store(value, vf16_fp8(items));
        memcpy(&scale, scales + k / block * 4, sizeof scale);
        out[k] = (codes[k] & 0x7f) == 0x7f ? float_of(0x7fc00000) : value[0] * 256.0f * scale;
    }
}

#endif
