/* Dot products with panels of q4_k and q6_k (formats/super_blocks.py) and of affine codes (formats/affine.py).
   Integer products are summed exactly within a group of weights, 16 or 32; groups are added ascending:
   acc = fma(float(sum), weight_scale * x_scale, acc), then, where there are minima, acc = fma(float(sum of x), minimum * x_scale, acc). */
#ifndef COLIBRI_KERN_BLOCKS_H
#define COLIBRI_KERN_BLOCKS_H

#include "kern_coded.h"

enum { SUPER = 256, Q6K_OFFSET = 32 /* a code is kept as code + 32 */, Q6K_NBYTES = 96 /* of 16 columns of a panel */ };

INLINE int is_blocks(int format) { return (format & BLOCKS) != 0; }
INLINE int has_halves(int format) { return format == Q6K_CODE || format == AFFINE_16_CODE; }
INLINE int has_minima(int format) { return format != Q6K_CODE; }
INLINE int64_t weights_group(int format) { return has_halves(format) ? 16 : 32; }

/* What lies before the codes of a panel of K = 32 groups columns, whose blocks are padded. */
INLINE int64_t blocks_head_nbytes(int format, int64_t groups) {
    const int64_t blocks = (groups + 7) / 8;
    if (format == Q4K_CODE) return blocks * PANEL * 20;
    return format == Q6K_CODE ? blocks * PANEL * 18 : groups * 32 / weights_group(format) * PANEL * 8;
}

INLINE int64_t blocks_panel_nbytes(int format, int64_t K) {
    const int64_t groups = (K + 31) / 32, blocks = (groups + 7) / 8, head = blocks_head_nbytes(format, groups);
    return head + (format == Q4K_CODE ? blocks * PANEL * 128 : format == Q6K_CODE ? blocks * PANEL * 192 : groups * 32 * PANEL);
}

#if defined(VEC_AVX2)
INLINE vf8 vf8_f32(const void *p) { return _mm256_loadu_ps((const float *)p); }
INLINE vf8 vf8_u8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf8 vf8_i8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
#else
INLINE vf8 vf8_f32(const void *p) { vf8 r; memcpy(r.f, p, sizeof r.f); return r; }
INLINE vf8 vf8_u8(const void *p) { const uint8_t *items = p; vf8 r; EACH8(r.f[l] = (float)items[l]); return r; }
INLINE vf8 vf8_i8(const void *p) { const int8_t *items = p; vf8 r; EACH8(r.f[l] = (float)items[l]); return r; }
#endif

/* Scales of weight group g of a panel of 32 groups columns; products with small integers are exact. */
INLINE vf8 vf8_block_scales(int format, const uint8_t *panel, int64_t groups, int64_t g) {
    const int64_t blocks = (groups + 7) / 8;
    if (format == Q4K_CODE) return vf8_mul(vf8_half(panel + g / 8 * 16), vf8_u8(panel + blocks * 32 + g * 8));
    if (format == Q6K_CODE) return vf8_mul(vf8_half(panel + g / 16 * 16), vf8_i8(panel + blocks * 16 + g * 8));
    return vf8_f32(panel + g * 32);
}

/* What is added to scale * code. */
INLINE vf8 vf8_block_minima(int format, const uint8_t *panel, int64_t groups, int64_t g) {
    const int64_t blocks = (groups + 7) / 8;
    if (format != Q4K_CODE) return vf8_f32(panel + (groups * 32 / weights_group(format) + g) * 32);
    const vf8 minima = vf8_mul(vf8_half(panel + blocks * 16 + g / 8 * 16), vf8_u8(panel + blocks * 96 + g * 8));
    return vf8_mul(minima, vf8_set1(-1.0f));
}

#define V(name) name##_8
#define VI vi8
#define VIOP(name) vi8_##name
#define VF vf8
#define VFOP(name) vf8_##name
#define PANELS_OF_V 1
#define OF_PANELS(f, ...) f(__VA_ARGS__, panels[0], groups, g)
#include "kern_blocks_tile.h"
#undef V
#undef VI
#undef VIOP
#undef VF
#undef VFOP
#undef PANELS_OF_V
#undef OF_PANELS

#if HAVE_WIDE
#define V(name) name##_16
#define VI vi16
#define VIOP(name) vi16_##name
#define VF vf16
#define VFOP(name) vf16_##name
#define PANELS_OF_V 2
#define OF_PANELS(f, ...) vf16_two(f(__VA_ARGS__, panels[0], groups, g), f(__VA_ARGS__, panels[1], groups, g))
#include "kern_blocks_tile.h"
#undef V
#undef VI
#undef VIOP
#undef VF
#undef VFOP
#undef PANELS_OF_V
#undef OF_PANELS
#endif

/* out[n][8]: one panel of any coded format times n <= 8 coded inputs. */
static void any_panel(int format, const uint8_t *panel, const coded *c, const int64_t *rows, int n, float (*out)[8]) {
    if (!is_blocks(format)) {
        coded_panel(format, panel, c, rows, n, out);
        return;
    }
    const uint8_t *const panels[1] = {panel};
    float(*const to[1])[8] = {out};
    blocks_panels_8(format, panels, c, rows, n, to);
}

/* The same of two panels. */
static void any_panel_pair(int format, const uint8_t *const panels[2], const coded *c, const int64_t *rows, int n, float (*const out[2])[8]) {
    if (!is_blocks(format)) {
        coded_panel_pair(format, panels, c, rows, n, out);
        return;
    }
#if HAVE_WIDE
    blocks_panels_16(format, panels, c, rows, n, out);
#else
    for (int i = 0; i < 2; i++) any_panel(format, panels[i], c, rows, n, out[i]);
#endif
}

/* Eight codes (one of each row) of column k; `bytes` is what follows a panel's scales. */
INLINE vf8 block_codes(int format, const uint8_t *bytes, int64_t k) {
    const int byte = (int)(k & 3) * 8;
    if (format == AFFINE_CODE || format == AFFINE_16_CODE) return column_codes(INT8_CODE, bytes, k);
    const uint8_t *chunk = format == Q4K_CODE ? bytes + k / 8 * 32 : bytes + k / 16 * Q6K_NBYTES + k % 16 / 8 * 32;
    const vi8 nibble = vi8_and(vi8_shr(vi8_load(chunk), byte + (k & 4 ? 4 : 0)), vi8_set1(15));
    if (format == Q4K_CODE) return vi8_float(nibble);
    const vi8 upper = vi8_shr(vi8_load(bytes + k / 16 * Q6K_NBYTES + 64), byte + (int)(k % 16 / 4) * 2);
    return vi8_float(vi8_add(vi8_add(nibble, vi8_shl(vi8_and(upper, vi8_set1(3)), 4)), vi8_set1(-Q6K_OFFSET)));
}

/* One panel times float inputs: in a group s = fma(x_k, code_k, s) by ascending k from 0, then acc = fma(s, scale, acc), and with
   minima, t the sum of x_k, acc = fma(t, minimum, acc). */
static void block_panel_float(int format, const uint8_t *panel, const float *x, int64_t K, float out[8]) {
    const int64_t group = weights_group(format), groups = (K + 31) / 32;
    const uint8_t *bytes = panel + blocks_head_nbytes(format, groups);
    vf8 acc = vf8_zero();
    for (int64_t g = 0; g * group < K; g++) {
        const int64_t end = g * group + group < K ? g * group + group : K;
        vf8 sum = vf8_zero();
        float total = 0.0f;
        for (int64_t k = g * group; k < end; k++) {
            sum = vf8_fma(vf8_set1(x[k]), block_codes(format, bytes, k), sum);
            total += x[k];
        }
        acc = vf8_fma(sum, vf8_block_scales(format, panel, groups, g), acc);
        if (has_minima(format)) acc = vf8_fma(vf8_set1(total), vf8_block_minima(format, panel, groups, g), acc);
    }
    vf8_store(out, acc);
}

static void any_panel_float(int format, const uint8_t *panel, const float *x, int64_t K, float out[8]) {
    if (is_blocks(format)) block_panel_float(format, panel, x, K, out);
    else coded_panel_float(format, panel, x, K, out);
}

/* The numbers of one row of a panel. */
static void blocks_row(int format, const uint8_t *panel, int64_t lane, int64_t K, float *out) {
    const int64_t group = weights_group(format), groups = (K + 31) / 32;
    const uint8_t *bytes = panel + blocks_head_nbytes(format, groups);
    for (int64_t k = 0; k < K; k++) {
        float values[8];
        const vf8 codes = block_codes(format, bytes, k), scales = vf8_block_scales(format, panel, groups, k / group);
        if (has_minima(format)) vf8_store(values, vf8_fma(codes, scales, vf8_block_minima(format, panel, groups, k / group)));
        else vf8_store(values, vf8_mul(codes, scales));
        out[k] = values[lane];
    }
}

#endif
