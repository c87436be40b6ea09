/* One panel (VI vi8, VF vf8) or two (vi16, vf16) of blocks times N coded inputs. Included once for each width.
   format, wide and N are constants where these functions are called. */

/* Codes of six bits of columns [k, k + 16), from byte `at` on. */
INLINE void V(six_bits)(const uint8_t *const *panels, int64_t at, VI *w) {
    const VI low = VIOP(set1)(0x0f0f0f0f), pairs = VIOP(set1)(0x03030303);
    const VI first = VIOP(panels)(panels, at), second = VIOP(panels)(panels, at + 32), upper = VIOP(panels)(panels, at + 64);
    w[0] = VIOP(and)(first, low), w[1] = VIOP(and)(VIOP(shr16)(first, 4), low);
    w[2] = VIOP(and)(second, low), w[3] = VIOP(and)(VIOP(shr16)(second, 4), low);
    w[0] = VIOP(add)(w[0], VIOP(shl)(VIOP(and)(upper, pairs), 4));
    w[1] = VIOP(add)(w[1], VIOP(shl)(VIOP(and)(VIOP(shr16)(upper, 2), pairs), 4));
    w[2] = VIOP(add)(w[2], VIOP(shl)(VIOP(and)(VIOP(shr16)(upper, 4), pairs), 4));
    w[3] = VIOP(add)(w[3], VIOP(shl)(VIOP(and)(VIOP(shr16)(upper, 6), pairs), 4));
}

/* Exact sums of 16 columns of q6_k; `sum` comes with the offset in it. 16-bit sums hold two products of 63 * 127 * 2. */
INLINE void V(group_sixes)(int wide, int N, const uint8_t *const *panels, int64_t at, const uint8_t *const *q, VI *sum, const asking *asked) {
    const VI bytes = VIOP(set1)(0x00ff00ff);
    VI w[4];
    if ((at & (ASKED_NBYTES - 1)) < Q6K_NBYTES) V(ask)(asked, at, ASKED_NBYTES);
    V(six_bits)(panels, at, w);
    for (int n = 0; n < N; n++) {
        VI part[2] = {VIOP(set1)(0), VIOP(set1)(0)};
        _Pragma("GCC unroll 4")
        for (int i = 0; i < 4; i++) {
            if (wide) {
                part[0] = VIOP(pairs)(part[0], VIOP(and)(w[i], bytes), q[n] + 8 * i);
                part[1] = VIOP(pairs)(part[1], VIOP(shr16)(w[i], 8), q[n] + 8 * i + 4);
            } else {
                part[i & 1] = VIOP(bytes)(part[i & 1], w[i], q[n] + 4 * i);
            }
        }
        for (int i = 0; i < 2; i++) sum[n] = VIOP(add)(sum[n], wide ? part[i] : VIOP(flush)(part[i]));
    }
}

INLINE void V(block_tile)(int format, int wide, int N, const uint8_t *const *panels, const coded *c, const int64_t *rows, float (*const *out)[8]) {
    const int64_t groups = c->groups, group = weights_group(format), num = groups * 32 / group, per = 32 / group;
    const int64_t step = format == Q4K_CODE ? 128 : format == Q6K_CODE ? Q6K_NBYTES : group * PANEL;
    const int offset = format == Q6K_CODE ? Q6K_OFFSET : format == Q4K_CODE || wide ? 0 : INT8_OFFSET;
    int64_t at = blocks_head_nbytes(format, groups);
    const asking asked = asking_of(panels, PANELS_OF_V, blocks_panel_nbytes(format, groups * 32));
    const uint8_t *q[8];
    const float *x_scale[8];
    const int32_t *x_sum[8];
    VF acc[8];
    for (int n = 0; n < N; n++) {
        q[n] = c->codes + rows[n] * groups * 32 * (wide ? 2 : 1);
        x_scale[n] = c->scales + rows[n] * groups;
        x_sum[n] = has_halves(format) ? c->halves + rows[n] * num : c->sums + rows[n] * num;
        acc[n] = VFOP(zero)();
    }
    for (int64_t g = 0; g < num; g++, at += step) {
        VI sum[8];
        for (int n = 0; n < N; n++) sum[n] = VIOP(set1)(offset ? -offset * x_sum[n][g] : 0);
        if (format == Q6K_CODE) V(group_sixes)(wide, N, panels, at, q, sum, &asked);
        else if (wide) V(group_pairs)(format == Q4K_CODE ? INT4_CODE : INT8_CODE, N, panels, at, group, q, sum, &asked);
        else V(group_bytes)(format == Q4K_CODE ? INT4_CODE : INT8_CODE, N, panels, at, group, q, sum, &asked);
        const VF scale = OF_PANELS(vf8_block_scales, format);
        for (int n = 0; n < N; n++) {
            acc[n] = VFOP(fma)(VIOP(float)(sum[n]), VFOP(mul)(scale, VFOP(set1)(x_scale[n][g / per])), acc[n]);
            q[n] += group * (wide ? 2 : 1);
        }
        if (!has_minima(format)) continue;
        const VF minimum = OF_PANELS(vf8_block_minima, format);
        for (int n = 0; n < N; n++) {
            acc[n] = VFOP(fma)(VFOP(set1)((float)x_sum[n][g]), VFOP(mul)(minimum, VFOP(set1)(x_scale[n][g / per])), acc[n]);
        }
    }
    for (int n = 0; n < N; n++) VFOP(store_panels)(out, n, acc[n]);
}

/* Any n <= 8 inputs, in tiles. */
INLINE void V(block_tiles)(int format, int wide, const uint8_t *const *panels, const coded *c, const int64_t *rows, int n, float (*const *out)[8]) {
    float(*to[2])[8] = {out[0], out[PANELS_OF_V - 1]};
#define STEP(N) V(block_tile)(format, wide, N, panels, c, rows, to), n -= N, rows += N, to[0] += N, to[1] += N
    while (n >= 4) STEP(4);
    if (n >= 2) STEP(2);
    if (n) STEP(1);
#undef STEP
}

static void V(blocks_panels)(int format, const uint8_t *const *panels, const coded *c, const int64_t *rows, int n, float (*const *out)[8]) {
    if (format == Q4K_CODE && c->wide) V(block_tiles)(Q4K_CODE, 1, panels, c, rows, n, out);
    else if (format == Q4K_CODE) V(block_tiles)(Q4K_CODE, 0, panels, c, rows, n, out);
    else if (format == Q6K_CODE && c->wide) V(block_tiles)(Q6K_CODE, 1, panels, c, rows, n, out);
    else if (format == Q6K_CODE) V(block_tiles)(Q6K_CODE, 0, panels, c, rows, n, out);
    else if (format == AFFINE_CODE && c->wide) V(block_tiles)(AFFINE_CODE, 1, panels, c, rows, n, out);
    else if (format == AFFINE_CODE) V(block_tiles)(AFFINE_CODE, 0, panels, c, rows, n, out);
    else if (c->wide) V(block_tiles)(AFFINE_16_CODE, 1, panels, c, rows, n, out);
    else V(block_tiles)(AFFINE_16_CODE, 0, panels, c, rows, n, out);
}
