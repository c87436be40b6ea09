/* One panel (VI vi8, VF vf8) or two (vi16, vf16) times N coded inputs. Included once for each width.
   kind, wide and N are constants where these functions are called. */

/* Asks for what comes a few stripes later, once for each 256 bytes that begin at `at`; `nbytes` of them are used now. */
INLINE void V(ask)(const asking *a, int64_t at, int64_t nbytes) {
    if (nbytes < ASKED_NBYTES && at & nbytes) return;
    for (int i = 0; i < PANELS_OF_V; i++) ask_ahead(a->from[i] + a->step * at, a->ahead);
}

/* Exact sums of one group: the chunks of `panels` from byte `at` on times codes q[n]; `sum` comes with the offsets in it.
   Runs of eight chunks. For few inputs, int4 weights are not all shifted down to be multiplied: two of the four sums come
   out 16 and 256 times as large, which 32 bits just hold for the 16 products of a run (16 * 15 * 256 * 32767 < 2^31). */
INLINE void V(group_pairs)(int kind, int N, const uint8_t *const *panels, int64_t at, int64_t group, const uint8_t *const *q, VI *sum,
                           const asking *asked) {
    const VI nibble = VIOP(set1)(0x000f000f), nibbles = VIOP(set1)(0x0f0f0f0f), low = VIOP(set1)(0x00ff00ff);
    const int64_t chunk = kind == INT8_CODE ? 4 : 8, run = group < 8 * chunk ? group : 8 * chunk;
    const int scaled = kind == INT4_CODE && N <= 2;
    const int parts = scaled ? 4 : N >= (HAVE_VNNI ? 8 : 4) ? 1 : 2; /* several sums, or each addition would wait for the one before */
    for (int64_t begin = 0; begin < group; begin += run) {
        VI part[8][4];
        for (int n = 0; n < N; n++) {
            for (int i = 0; i < parts; i++) part[n][i] = VIOP(set1)(0);
        }
        V(ask)(asked, at, run / chunk * 32);
        _Pragma("GCC unroll 8")
        for (int64_t k = begin; k < begin + run; k += chunk, at += 32) {
            const VI v = VIOP(panels)(panels, at);
            VI w[4];
            if (kind == INT8_CODE) {
                w[0] = VIOP(low_bytes)(v), w[1] = VIOP(high_bytes)(v);
            } else if (scaled) {
                w[0] = VIOP(and)(v, nibble), w[1] = VIOP(and)(v, VIOP(set1)(0x0f000f00));
                w[2] = VIOP(and)(v, VIOP(set1)(0x00f000f0)), w[3] = VIOP(shr16)(v, 12);
            } else if (kind == INT4_CODE) {
                w[0] = VIOP(and)(v, nibble), w[1] = VIOP(and)(VIOP(shr16)(v, 8), nibble);
                w[2] = VIOP(and)(VIOP(shr16)(v, 4), nibble), w[3] = VIOP(shr16)(v, 12);
            } else {
                const VI a = VIOP(mxfp4)(VIOP(and)(v, nibbles)), b = VIOP(mxfp4)(VIOP(and)(VIOP(shr16)(v, 4), nibbles));
                w[0] = VIOP(and)(a, low), w[1] = VIOP(shr16)(a, 8);
                w[2] = VIOP(and)(b, low), w[3] = VIOP(shr16)(b, 8);
            }
            for (int n = 0; n < N; n++) {
                const uint8_t *p = q[n] + 2 * k;
                for (int i = 0; i < (kind == INT8_CODE ? 2 : 4); i++) {
                    part[n][i % parts] = VIOP(pairs)(part[n][i % parts], w[i], p + 4 * i);
                    KEEP_SUM(part[n][i % parts]);
                }
            }
        }
        for (int n = 0; n < N; n++) {
            if (scaled) part[n][1] = VIOP(sar)(part[n][1], 8), part[n][2] = VIOP(sar)(part[n][2], 4);
            for (int i = 0; i < parts; i++) sum[n] = VIOP(add)(sum[n], part[n][i]);
        }
    }
}

INLINE void V(group_bytes)(int kind, int N, const uint8_t *const *panels, int64_t at, int64_t group, const uint8_t *const *q, VI *sum,
                           const asking *asked) {
    const VI nibbles = VIOP(set1)(0x0f0f0f0f);
    const int64_t chunk = kind == INT8_CODE ? 4 : 8, run = group < chunk * MOST_BYTE_SUMS ? group : chunk * MOST_BYTE_SUMS;
    const int parts = HAVE_VNNI && N >= 8 ? 1 : 2;
    for (int64_t begin = 0; begin < group; begin += run) {
        VI part[8][2];
        for (int n = 0; n < N; n++) part[n][0] = part[n][1] = VIOP(set1)(0);
        V(ask)(asked, at, run / chunk * 32);
        _Pragma("GCC unroll 4")
        for (int64_t k = begin; k < begin + run; k += 2 * chunk, at += 64) {
            for (int64_t half = 0; half < 2; half++) {
                const VI v = VIOP(panels)(panels, at + 32 * half);
                const uint8_t *const *p = q;
                if (kind == INT8_CODE) {
                    for (int n = 0; n < N; n++) {
                        part[n][half % parts] = VIOP(signed_bytes)(part[n][half % parts], v, p[n] + k + 4 * half);
                        KEEP_SUM(part[n][half % parts]);
                    }
                    continue;
                }
                VI a = VIOP(and)(v, nibbles), b = VIOP(and)(VIOP(shr16)(v, 4), nibbles);
                if (kind == MXFP4_CODE) a = VIOP(mxfp4)(a), b = VIOP(mxfp4)(b);
                for (int n = 0; n < N; n++) {
                    part[n][0] = VIOP(bytes)(part[n][0], a, p[n] + k + 8 * half);
                    KEEP_SUM(part[n][0]);
                    part[n][1 % parts] = VIOP(bytes)(part[n][1 % parts], b, p[n] + k + 8 * half + 4);
                    KEEP_SUM(part[n][1 % parts]);
                }
            }
        }
        for (int n = 0; n < N; n++) {
            for (int i = 0; i < parts; i++) sum[n] = VIOP(add)(sum[n], kind == INT8_CODE ? part[n][i] : VIOP(flush)(part[n][i]));
        }
    }
}

INLINE VF V(scales)(int kind, int bf16, const uint8_t *const *panels, int64_t g) {
    if (kind == MXFP4_CODE) return VFOP(ue8m0_panels)(panels, g * 8);
    return bf16 ? VFOP(bf16_panels)(panels, g * 16) : VFOP(half_panels)(panels, g * 16);
}

INLINE void V(tile)(int kind, int wide, int bf16, int N, const uint8_t *const *panels, int64_t group, const coded *c, const int64_t *rows,
                    float (*const *out)[8]) {
    const int64_t groups = c->groups, group_nbytes = group * PANEL / (kind == INT8_CODE ? 1 : 2);
    const int offset = kind == INT4_CODE ? INT4_OFFSET : kind == MXFP4_CODE ? MXFP4_OFFSET : wide ? 0 : INT8_OFFSET;
    int64_t at = groups * PANEL * scale_nbytes(kind);
    const asking asked = asking_of(panels, PANELS_OF_V, at + groups * group_nbytes);
    const uint8_t *q[8];
    const float *x_scale[8];
    const int32_t *x_sum[8];
    VF acc[8];
    for (int n = 0; n < N; n++) {
        q[n] = c->codes + rows[n] * groups * group * (wide ? 2 : 1);
        x_scale[n] = c->scales + rows[n] * groups;
        x_sum[n] = c->sums + rows[n] * groups;
        acc[n] = VFOP(zero)();
    }
    for (int64_t g = 0; g < groups; g++, at += group_nbytes) {
        VI sum[8];
        for (int n = 0; n < N; n++) sum[n] = VIOP(set1)(offset ? -offset * x_sum[n][g] : 0);
        if (wide) V(group_pairs)(kind, N, panels, at, group, q, sum, &asked);
        else V(group_bytes)(kind, N, panels, at, group, q, sum, &asked);
        const VF scale = V(scales)(kind, bf16, panels, g);
        for (int n = 0; n < N; n++) {
            if (kind == MXFP4_CODE) { /* codes are doubled; a power of two comes last, so that even 2^-127 rounds nothing */
                const VF y = VFOP(mul)(VFOP(mul)(VIOP(float)(sum[n]), VFOP(set1)(0.5f)), VFOP(set1)(x_scale[n][g]));
                acc[n] = VFOP(fma)(y, scale, acc[n]);
            } else {
                acc[n] = VFOP(fma)(VIOP(float)(sum[n]), VFOP(mul)(scale, VFOP(set1)(x_scale[n][g])), acc[n]);
            }
            q[n] += group * (wide ? 2 : 1);
        }
    }
    for (int n = 0; n < N; n++) VFOP(store_panels)(out, n, acc[n]);
}

/* Any n <= 8 inputs, in tiles. */
INLINE void V(tiles)(int kind, int wide, int bf16, const uint8_t *const *panels, int64_t group, const coded *c, const int64_t *rows, int n,
                     float (*const *out)[8]) {
    float(*to[2])[8] = {out[0], out[PANELS_OF_V - 1]};
#define STEP(N) V(tile)(kind, wide, bf16, N, panels, group, c, rows, to), n -= N, rows += N, to[0] += N, to[1] += N
    if (HAVE_VNNI && n == 8) STEP(8);
    while (n >= 4) STEP(4);
    if (n >= 2) STEP(2);
    if (n) STEP(1);
#undef STEP
}

static void V(coded_panels)(int format, const uint8_t *const *panels, const coded *c, const int64_t *rows, int n, float (*const *out)[8]) {
    const int kind = coded_kind(format), wide = c->wide;
    const int64_t group = coded_group(format);
    const int bf16 = (format & BF16_SCALES) != 0;
    if (kind == INT4_CODE && bf16 && wide) V(tiles)(INT4_CODE, 1, 1, panels, group, c, rows, n, out);
    else if (kind == INT4_CODE && bf16) V(tiles)(INT4_CODE, 0, 1, panels, group, c, rows, n, out);
    else if (kind == INT4_CODE && group == 64 && wide) V(tiles)(INT4_CODE, 1, 0, panels, 64, c, rows, n, out);
    else if (kind == INT4_CODE && group == 64) V(tiles)(INT4_CODE, 0, 0, panels, 64, c, rows, n, out);
    else if (kind == INT4_CODE && wide) V(tiles)(INT4_CODE, 1, 0, panels, group, c, rows, n, out);
    else if (kind == INT4_CODE) V(tiles)(INT4_CODE, 0, 0, panels, group, c, rows, n, out);
    else if (kind == INT8_CODE && wide) V(tiles)(INT8_CODE, 1, 0, panels, group, c, rows, n, out);
    else if (kind == INT8_CODE) V(tiles)(INT8_CODE, 0, 0, panels, group, c, rows, n, out);
    else if (wide) V(tiles)(MXFP4_CODE, 1, 0, panels, 32, c, rows, n, out);
    else V(tiles)(MXFP4_CODE, 0, 0, panels, 32, c, rows, n, out);
}
