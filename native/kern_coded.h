/* Dot products with integer-coded weights in panels of eight rows (formats/integer.py has the layout).
   Integer products are summed exactly within a group of K; groups are added ascending:
   acc = fma(float(sum), weight_scale * x_scale, acc). */
#ifndef COLIBRI_KERN_CODED_H
#define COLIBRI_KERN_CODED_H

#include "kern_dot.h"
#include "kern_float.h"

enum { PANEL = 8, INT4_OFFSET = 8 /* an int4 code is kept as code + 8 */ };

/* Inputs coded for one group size. 16-bit codes stand within each four as 0 2 1 3, the order in which a panel's bytes come
   apart into 16-bit pairs; 8-bit codes stand in order. */
typedef struct {
    uint8_t *codes; /* [rows, padded K] of two bytes or one */
    float *scales;  /* [rows, padded K / group] */
    int32_t *sums;  /* [rows, padded K / group] sum of the codes, for weights whose codes are kept with an offset */
    int64_t groups; /* padded K / group */
    int wide;       /* two bytes */
} coded;

static inline int64_t coded_group(int format) { return 32ll << (format & 15); }
INLINE int is_coded(int format) { return format >= INT8_CODE; }
INLINE int coded_kind(int format) { return format & 0x30; }
INLINE int scale_nbytes(int kind) { return kind == MXFP4_CODE ? 1 : 2; }

/* The largest magnitude of 32 * n floats, as bits: their order is the order of magnitudes. */
INLINE int32_t largest_bits(const float *x, int n) {
    int32_t most[32] = {0};
    for (int i = 0; i < n; i++, x += 32) {
        for (int l = 0; l < 32; l++) {
            const int32_t a = (int32_t)(bits_of(x[l]) & 0x7fffffff);
            most[l] = a > most[l] ? a : most[l];
        }
    }
    for (int half = 16; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) most[l] = most[l + half] > most[l] ? most[l + half] : most[l];
    }
    return most[0];
}

static void store_codes(const int32_t *rounded, int group, int wide, uint8_t *codes) {
    if (!wide) {
        for (int i = 0; i < group; i++) codes[i] = (uint8_t)rounded[i];
        return;
    }
    for (int i = 0; i < group; i += 4, codes += 8) { /* two codes at a time: 0 1 and 2 3 become 0 2 1 3 */
        const uint64_t lows = 0x0000ffff0000ffff;
        uint64_t first, second, four;
        memcpy(&first, rounded + i, sizeof first), memcpy(&second, rounded + i + 2, sizeof second);
        four = (first & lows) | (second << 16 & ~lows);
        memcpy(codes, &four, sizeof four);
    }
}

/* Codes x [group]: q = rint(x * (top / max)), scale = max / top. A group that is not finite gets a NaN for its scale and so
   poisons its row; one below 1e-30 counts as zero. */
static void code_group(const float *x, int group, float top, int wide, uint8_t *codes, float *scale, int32_t *sum) {
    int32_t rounded[128], total = 0;
    const int32_t most = largest_bits(x, group / 32);
    const float max = float_of((uint32_t)most);
    const int finite = most < 0x7f800000;
    if (!finite || !(max > 1e-30f)) {
        memset(codes, 0, (size_t)group * (wide ? 2 : 1));
        *sum = 0, *scale = finite ? 0.0f : float_of(0x7fc00000);
        return;
    }
    const float factor = top / max;
    for (int i = 0; i < group; i++) {
        const float shifted = x[i] * factor + ROUND_MAGIC;
        rounded[i] = (int32_t)(bits_of(shifted) - bits_of(ROUND_MAGIC));
        total += rounded[i];
    }
    store_codes(rounded, group, wide, codes);
    *sum = total, *scale = max / top;
}

/* Codes groups [first, last) of row `row`, whose floats start at x (column 0) and end at K. */
static void code_row(const coded *c, int64_t row, const float *x, int64_t K, int64_t group, float top, int64_t first, int64_t last) {
    for (int64_t g = first; g < last; g++) {
        const int64_t left = K - g * group, i = row * c->groups + g;
        uint8_t *codes = c->codes + i * group * (c->wide ? 2 : 1);
        float padded[128] = {0};
        if (left < group) memcpy(padded, x + g * group, (size_t)left * sizeof *x);
        code_group(left < group ? padded : x + g * group, (int)group, top, c->wide, codes, c->scales + i, c->sums + i);
    }
}

#define V(name) name##_8
#define VI vi8
#define VIOP(name) vi8_##name
#define VF vf8
#define VFOP(name) vf8_##name
#define PANELS_OF_V 1
#include "kern_coded_tile.h"
#undef V
#undef VI
#undef VIOP
#undef VF
#undef VFOP
#undef PANELS_OF_V

#if HAVE_WIDE
#define V(name) name##_16
#define VI vi16
#define VIOP(name) vi16_##name
#define VF vf16
#define VFOP(name) vf16_##name
#define PANELS_OF_V 2
#include "kern_coded_tile.h"
#endif

/* out[n][8]: one panel times n <= 8 coded inputs. */
static void coded_panel(int format, const uint8_t *panel, const coded *c, const int64_t *rows, int n, float (*out)[8]) {
    const uint8_t *const panels[1] = {panel};
    float(*const to[1])[8] = {out};
    coded_panels_8(format, panels, c, rows, n, to);
}

/* The same of two panels. */
static void coded_panel_pair(int format, const uint8_t *const panels[2], const coded *c, const int64_t *rows, int n, float (*const out[2])[8]) {
#if HAVE_WIDE
    coded_panels_16(format, panels, c, rows, n, out);
#else
    for (int i = 0; i < 2; i++) coded_panel(format, panels[i], c, rows, n, out[i]);
#endif
}

/* Eight weights over their scale (one of each row) of column k; `bytes` is what follows a panel's scales. */
INLINE vf8 column_codes(int kind, const uint8_t *bytes, int64_t k) {
    const int byte = (int)(k & 3) * 8;
    const vi8 v = vi8_load(bytes + (kind == INT8_CODE ? k / 4 : k / 8) * 32);
    if (kind == INT8_CODE) return vi8_float(vi8_sar(vi8_shl(v, 24 - byte), 24));
    const vi8 nibble = vi8_and(vi8_shr(v, byte + (k & 4 ? 4 : 0)), vi8_set1(15));
    if (kind == INT4_CODE) return vi8_float(vi8_add(nibble, vi8_set1(-INT4_OFFSET)));
    const vi8 doubled = vi8_add(vi8_and(vi8_mxfp4(nibble), vi8_set1(255)), vi8_set1(-MXFP4_OFFSET));
    return vf8_mul(vi8_float(doubled), vf8_set1(0.5f));
}

/* Scales of group g of a panel. */
INLINE vf8 group_scales(int format, const uint8_t *panel, int64_t g) {
    if (coded_kind(format) == MXFP4_CODE) return vf8_ue8m0(panel + g * 8);
    return format & BF16_SCALES ? vf8_bf16(panel + g * 16) : vf8_half(panel + g * 16);
}

/* One panel times float inputs: in a group s = fma(x_k, code_k, s) by ascending k from 0, then acc = fma(s, scale, acc). */
static void coded_panel_float(int format, const uint8_t *panel, const float *x, int64_t K, float out[8]) {
    const int kind = coded_kind(format);
    const int64_t group = coded_group(format), groups = (K + group - 1) / group;
    const uint8_t *bytes = panel + groups * PANEL * scale_nbytes(kind);
    vf8 acc = vf8_zero();
    for (int64_t g = 0; g < groups; g++) {
        vf8 sum = vf8_zero();
        const int64_t end = g * group + group < K ? g * group + group : K;
        for (int64_t k = g * group; k < end; k++) {
            const vf8 codes = kind == INT8_CODE   ? column_codes(INT8_CODE, bytes, k)
                              : kind == INT4_CODE ? column_codes(INT4_CODE, bytes, k)
                                                  : column_codes(MXFP4_CODE, bytes, k);
            sum = vf8_fma(vf8_set1(x[k]), codes, sum);
        }
        acc = vf8_fma(sum, group_scales(format, panel, g), acc);
    }
    vf8_store(out, acc);
}

#endif
