/* Dot products with integer-coded weights in panels of eight rows (formats/integer.py has the layout).
   Integer products are summed exactly within a group of K; groups are added ascending:
   acc = fma(float(sum), weight_scale * x_scale, acc). */
#ifndef COLIBRI_KERN_CODED_H
#define COLIBRI_KERN_CODED_H

#include "kern_float.h"

enum { PREFETCH_NBYTES = 1536 };

/* Inputs coded for one group size. Within each eight, codes stand as 0 2 1 3 4 6 5 7: the order in which a panel's bytes
   come apart into 16-bit pairs. */
typedef struct {
    int16_t *codes; /* [rows, padded K] */
    float *scales;  /* [rows, padded K / group] */
    int32_t *sums;  /* [rows, padded K / group] sum of the codes, for int4's offset of 8 */
    int64_t groups; /* padded K / group */
} coded;

static inline int64_t coded_group(int format) { return 32ll << (format & 15); }
INLINE int is_coded(int format) { return format >= INT8_CODE; }
INLINE int is_int4(int format) { return format >= INT4_CODE; }

/* Codes x [n], n <= group, padded with zeros: q = rint(x * (top / max)), scale = max / top. A group that is not finite
   gets a NaN for its scale and so poisons its row; one below 1e-30 counts as zero. */
static void code_group(const float *x, int n, int group, float top, int16_t *codes, float *scale, int32_t *sum) {
    float values[128] = {0};
    int32_t rounded[128];
    memcpy(values, x, (size_t)n * sizeof *x);
    int32_t most = 0; /* the order of magnitudes is the order of their bits */
    for (int i = 0; i < group; i++) {
        const int32_t a = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        most = a > most ? a : most;
    }
    const float max = float_of((uint32_t)most);
    const int finite = most < 0x7f800000;
    const float factor = finite && max > 1e-30f ? top / max : 0.0f;
    int32_t total = 0;
    if (factor == 0.0f) {
        memset(rounded, 0, sizeof rounded);
    } else {
        for (int i = 0; i < group; i++) {
            const float shifted = values[i] * factor + ROUND_MAGIC;
            rounded[i] = (int32_t)(bits_of(shifted) - bits_of(ROUND_MAGIC));
            total += rounded[i];
        }
    }
    for (int i = 0; i < group; i += 4) {
        codes[i] = (int16_t)rounded[i];
        codes[i + 1] = (int16_t)rounded[i + 2];
        codes[i + 2] = (int16_t)rounded[i + 1];
        codes[i + 3] = (int16_t)rounded[i + 3];
    }
    *sum = total;
    *scale = finite ? (factor == 0.0f ? 0.0f : max / top) : float_of(0x7fc00000);
}

/* Codes groups [first, last) of row `row`, whose floats start at x (column 0) and end at K. */
static void code_row(const coded *c, int64_t row, const float *x, int64_t K, int64_t group, float top, int64_t first, int64_t last) {
    for (int64_t g = first; g < last; g++) {
        const int64_t left = K - g * group, i = row * c->groups + g;
        code_group(x + g * group, (int)(left < group ? left : group), (int)group, top, c->codes + i * group, c->scales + i, c->sums + i);
    }
}

/* One panel times N coded inputs: out[n][8]. int4 and N are constants where it is called. */
INLINE void coded_panel_n(int int4, int N, const uint8_t *panel, int64_t groups, int64_t group, const coded *c, const int64_t *rows,
                          float (*out)[8]) {
    const uint8_t *scales = panel, *bytes = panel + groups * 16;
    const vi8 nibble = vi8_set1(0x000f000f);
    const int16_t *q[4];
    const float *x_scale[4];
    const int32_t *x_sum[4];
    vf8 acc[4];
    for (int n = 0; n < N; n++) {
        q[n] = c->codes + rows[n] * groups * group;
        x_scale[n] = c->scales + rows[n] * groups;
        x_sum[n] = c->sums + rows[n] * groups;
        acc[n] = vf8_zero();
    }
    for (int64_t g = 0; g < groups; g++) {
        vi8 sum[4];
        for (int n = 0; n < N; n++) sum[n] = vi8_set1(int4 ? -8 * x_sum[n][g] : 0);
        for (int64_t k = 0; k < group; k += int4 ? 8 : 4, bytes += 32) {
            const vi8 v = vi8_load(bytes);
            __builtin_prefetch(bytes + PREFETCH_NBYTES);
            const vi8 a = int4 ? vi8_and(v, nibble) : vi8_low_bytes(v);
            const vi8 b = int4 ? vi8_and(vi8_shr(v, 8), nibble) : vi8_high_bytes(v);
            for (int n = 0; n < N; n++) {
                const int16_t *p = q[n] + g * group + k;
                sum[n] = vi8_add(sum[n], vi8_add(vi8_dot(a, p), vi8_dot(b, p + 2)));
            }
            if (int4) {
                const vi8 d = vi8_and(vi8_shr(v, 4), nibble), e = vi8_and(vi8_shr(v, 12), nibble);
                for (int n = 0; n < N; n++) {
                    const int16_t *p = q[n] + g * group + k + 4;
                    sum[n] = vi8_add(sum[n], vi8_add(vi8_dot(d, p), vi8_dot(e, p + 2)));
                }
            }
        }
        const vf8 scale = vf8_half(scales + g * 16);
        for (int n = 0; n < N; n++) acc[n] = vf8_fma(vi8_float(sum[n]), vf8_mul(scale, vf8_set1(x_scale[n][g])), acc[n]);
    }
    for (int n = 0; n < N; n++) vf8_store(out[n], acc[n]);
}

INLINE void coded_panel_of(int int4, const uint8_t *panel, int64_t group, const coded *c, const int64_t *rows, int n, float (*out)[8]) {
    for (; n >= 4; n -= 4, rows += 4, out += 4) coded_panel_n(int4, 4, panel, c->groups, group, c, rows, out);
    if (n >= 2) coded_panel_n(int4, 2, panel, c->groups, group, c, rows, out), n -= 2, rows += 2, out += 2;
    if (n) coded_panel_n(int4, 1, panel, c->groups, group, c, rows, out);
}

static void coded_panel(int format, const uint8_t *panel, const coded *c, const int64_t *rows, int n, float (*out)[8]) {
    if (is_int4(format)) coded_panel_of(1, panel, coded_group(format), c, rows, n, out);
    else coded_panel_of(0, panel, coded_group(format), c, rows, n, out);
}

/* Eight codes (one of each row) of column k as floats. */
INLINE vf8 column_codes(int int4, const uint8_t *bytes, int64_t k) {
    const vi8 v = vi8_load(bytes + (int4 ? k / 8 : k / 4) * 32);
    const int byte = (int)(k & 3) * 8;
    if (int4) return vi8_float(vi8_add(vi8_and(vi8_shr(v, byte + (k & 4 ? 4 : 0)), vi8_set1(15)), vi8_set1(-8)));
    return vi8_float(vi8_sar(vi8_shl(v, 24 - byte), 24));
}

/* One panel times float inputs: in a group s = fma(x_k, code_k, s) by ascending k from 0, then acc = fma(s, scale, acc). */
static void coded_panel_float(int format, const uint8_t *panel, const float *x, int64_t K, float out[8]) {
    const int64_t group = coded_group(format), groups = (K + group - 1) / group;
    const uint8_t *bytes = panel + groups * 16;
    vf8 acc = vf8_zero();
    for (int64_t g = 0; g < groups; g++) {
        vf8 sum = vf8_zero();
        const int64_t end = g * group + group < K ? g * group + group : K;
        for (int64_t k = g * group; k < end; k++) {
            const vf8 codes = is_int4(format) ? column_codes(1, bytes, k) : column_codes(0, bytes, k);
            sum = vf8_fma(vf8_set1(x[k]), codes, sum);
        }
        acc = vf8_fma(sum, vf8_half(panel + g * 16), acc);
    }
    vf8_store(out, acc);
}

#endif
