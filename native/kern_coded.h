/* Dot products with integer-coded weights in panels of eight rows (formats/integer.py has the layout).
   Integer products are summed exactly within a group of K; groups are added ascending:
   acc = fma(float(sum), weight_scale * x_scale, acc). */
#ifndef COLIBRI_KERN_CODED_H
#define COLIBRI_KERN_CODED_H

#include "kern_code.h"
#include "kern_dot.h"
#include "kern_float.h"

enum { PANEL = 8, INT4_OFFSET = 8 /* an int4 code is kept as code + 8 */ };

static inline int64_t coded_group(int format) { return 32ll << (format & 15); }
INLINE int is_coded(int format) { return format >= INT8_CODE; }
INLINE int coded_kind(int format) { return format & 0x30; }
INLINE int scale_nbytes(int kind) { return kind == MXFP4_CODE ? 1 : 2; }

/* How panels that are read at once ask for what comes next. Those that follow each other ask in line, as if they were read one after the
   other: memory is fastest that way. */
typedef struct {
    const uint8_t *from[2];
    int64_t step, ahead; /* bytes asked for with each byte of a panel; how far ahead */
} asking;

INLINE asking asking_of(const uint8_t *const *panels, int num, int64_t panel_nbytes) {
    if (num == 1) return (asking){{panels[0], panels[0]}, 1, stripes_ahead(0)};
    if (panels[1] - panels[0] != panel_nbytes) return (asking){{panels[0], panels[1]}, 1, stripes_ahead(0)};
    return (asking){{panels[0], panels[0] + ASKED_NBYTES}, 2, stripes_ahead(panel_nbytes)};
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
#undef V
#undef VI
#undef VIOP
#undef VF
#undef VFOP
#undef PANELS_OF_V
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
