/* Floats rounded to integer codes, as IntegerFormat.encode does it, bit for bit. */
#ifndef COLIBRI_KERN_ENCODE_H
#define COLIBRI_KERN_ENCODE_H

#include "kern_eight.h"
#include "pack_items.h"

#include <math.h>

enum { PANEL_LANES = 8 /* rows of a panel */, MOST_GROUP = 128, MOST_TRIED = 8 };

typedef struct {
    const colibri_packing *p;
    const uint8_t *items, *scales, *importance; /* NULL: none */
} float_source;

/* A group's floats, and how much each matters. */
typedef struct {
    float x[MOST_GROUP], importance[MOST_GROUP];
} float_group;

/* Row `row`, columns from `first` on, as floats; zeros from the last column or row on. */
static void load_group(const float_source *s, int64_t row, int64_t first, float *x) {
    const colibri_packing *p = s->p;
    const colibri_items *items = &p->items;
    const int64_t left = row < p->rows ? p->columns - first : 0, n = left < p->group ? left : p->group;
    const uint8_t *from = s->items + row * items->row_step + first * items->column_step;
    if (items->kind == ITEM_BF16 && items->column_step == 2 && n == p->group && !s->scales) { /* the usual case */
        for (int64_t k = 0; k < n; k += 8) eight_store(x + k, eight_bf16(from + k * 2));
        return;
    }
    for (int64_t k = n > 0 ? n : 0; k < p->group; k++) x[k] = 0.0f;
    if (items->kind == ITEM_BF16) {
        for (int64_t k = 0; k < n; k++) x[k] = item_at(from + k * items->column_step, ITEM_BF16);
    } else {
        for (int64_t k = 0; k < n; k++) x[k] = item_at(from + k * items->column_step, items->kind);
    }
    if (!s->scales || n <= 0) return;
    const uint8_t *scales = s->scales + row / p->block_rows * p->scales.row_step;
    for (int64_t k = 0; k < n; k++) x[k] *= item_at(scales + (first + k) / p->block_columns * p->scales.column_step, p->scales.kind);
}

/* x * inverse to the nearest code, as floats. */
INLINE eight codes_of(eight x, float inverse, float top) {
    const eight magic = eight_set1(ROUND_MAGIC);
    const eight q = eight_sub(eight_add(eight_mul(x, eight_set1(inverse)), magic), magic);
    return eight_min(eight_max(q, eight_set1(-top)), eight_set1(top - 1));
}

INLINE float inverse_of(float scale) { return scale == 0 ? 0.0f : 1.0f / scale; }

typedef struct {
    uint16_t scale;
    float wide, least; /* the scale as float, and what rounding by it misses */
} found_scale;

/* Tries `count` scales near those that are wanted: what rounding by each misses is sum w (q s - x)^2. All are tried in one
   pass, because one alone would wait for its sum. */
INLINE void try_scales(const float_group *g, int group, float top, const float *wanted, int count, int weighed, found_scale *best) {
    float scales[MOST_TRIED], inverses[MOST_TRIED];
    uint16_t halves[MOST_TRIED];
    eight sums[MOST_TRIED];
    const eight largest = eight_set1(65504.0f), limited = eight_min(eight_load(wanted), largest);
    eight_store(scales, eight_halves(halves, eight_max(limited, eight_set1(-65504.0f))));
    for (int c = 0; c < count; c++) inverses[c] = inverse_of(scales[c]), sums[c] = eight_set1(0.0f);
    for (int k = 0; k < group; k += 8) {
        const eight x = eight_load(g->x + k);
        UNROLL for (int c = 0; c < count; c++) {
            const eight off = eight_sub(eight_mul(codes_of(x, inverses[c], top), eight_set1(scales[c])), x);
            const eight square = eight_mul(off, off);
            sums[c] = eight_add(sums[c], weighed ? eight_mul(eight_load(g->importance + k), square) : square);
        }
    }
    for (int c = 0; c < count; c++) {
        const float error = eight_sum(sums[c]);
        const int better = error < best->least;
        best->least = better ? error : best->least, best->wide = better ? scales[c] : best->wide;
        best->scale = better ? halves[c] : best->scale;
    }
}

/* The scale that fits best to the codes which `scale` gives: sum w q x / sum w q q. */
INLINE float fitted(const float_group *g, int group, float top, float scale, int weighed) {
    const float inverse = inverse_of(scale);
    eight above = eight_set1(0.0f), below = above;
    for (int k = 0; k < group; k += 8) {
        const eight x = eight_load(g->x + k), q = codes_of(x, inverse, top);
        const eight w = eight_load(g->importance + k), qx = eight_mul(q, x), qq = eight_mul(q, q);
        above = eight_add(above, weighed ? eight_mul(w, qx) : qx);
        below = eight_add(below, weighed ? eight_mul(w, qq) : qq);
    }
    const float wanted = eight_sum(above), by = eight_sum(below);
    return by > 0 ? wanted / by : 0.0f;
}

/* The first of the largest floats; sets `bad` where one is not within `most`. */
INLINE float extreme_of(const float_group *g, int group, float most, int *bad) {
    const eight limit = eight_set1(most);
    eight largest = eight_set1(0.0f);
    int fine = 1;
    for (int k = 0; k < group; k += 8) {
        const eight size = eight_abs(eight_load(g->x + k));
        fine &= eight_all_within(size, limit); /* NaN is not */
        largest = eight_max(size, largest);
    }
    float sizes[8], top = 0;
    eight_store(sizes, largest);
    for (int l = 0; l < 8; l++) top = sizes[l] > top ? sizes[l] : top;
    *bad = !fine;
    for (int k = 0; k < group; k++) {
        if (fabsf(g->x[k]) == top) return g->x[k];
    }
    return 0;
}

/* The scale of least error: among some that map the largest weight to another code, more of them where weights differ in
   importance, and that which fits the codes of the best of these. */
INLINE found_scale scale_of(const float_group *g, int group, float top, float extreme, int weighed) {
    const float few[8] = {-top, top - 1, -(top - 1), -(top - 0.5f), top - 0.5f, -(top + 0.5f), 1, 1};
    float wanted[MOST_TRIED];
    found_scale best = {0, 0, INFINITY};
    eight_store(wanted, eight_div(eight_set1(extreme), eight_load(few)));
    try_scales(g, group, top, wanted, 6, weighed, &best);
    for (int i = 0; weighed && i < 34; i++) {
        const float divisor = top * (0.75f + (float)(i / 2) / 32.0f);
        wanted[i % 2] = extreme / (i % 2 ? divisor : -divisor);
        if (i % 2) try_scales(g, group, top, wanted, 2, weighed, &best);
    }
    wanted[0] = fitted(g, group, top, best.wide, weighed);
    try_scales(g, group, top, wanted, 1, weighed, &best);
    return best;
}

/* Codes of one row's group, at `chunks` in steps of a chunk. */
INLINE void put_codes(const float_group *g, int group, float top, float scale, int64_t bits, uint8_t *chunks) {
    const float inverse = inverse_of(scale);
    int32_t codes[8];
    for (int k = 0; k < group; k += 8, chunks += PANEL_LANES * bits) {
        eight_integers(codes, codes_of(eight_load(g->x + k), inverse, top));
        uint32_t low = 0, high = 0;
        if (bits == 4) {
            for (int l = 0; l < 4; l++) low |= (uint32_t)((codes[l] + 8) | (codes[l + 4] + 8) << 4) << 8 * l;
            memcpy(chunks, &low, sizeof low);
            continue;
        }
        for (int l = 0; l < 4; l++) low |= ((uint32_t)codes[l] & 0xff) << 8 * l, high |= ((uint32_t)codes[l + 4] & 0xff) << 8 * l;
        memcpy(chunks, &low, sizeof low), memcpy(chunks + PANEL_LANES * 4, &high, sizeof high);
    }
}

/* One row's group; returns whether a weight has no code. */
INLINE int encode_group(const float_group *g, int group, float top, int64_t bits, int weighed, uint8_t *scale_at, uint8_t *chunks) {
    int bad;
    const float extreme = extreme_of(g, group, 65504.0f * top, &bad);
    if (bad) return 1;
    const found_scale found = scale_of(g, group, top, extreme, weighed);
    memcpy(scale_at, &found.scale, sizeof found.scale);
    put_codes(g, group, top, found.wide, bits, chunks);
    return 0;
}

/* How much each of the columns from `first` on matters; those behind the last do not. */
static void load_importance(const float_source *s, int64_t first, float *to) {
    if (!s->importance) return;
    const int64_t left = s->p->columns - first, n = left < s->p->group ? left : s->p->group;
    memset(to, 0, (size_t)s->p->group * sizeof *to);
    memcpy(to, s->importance + first * 4, (size_t)n * sizeof *to);
}

INLINE int encode_panel(const float_source *s, int64_t first, int group, float top, int64_t bits, int weighed, uint8_t *out) {
    const int64_t groups = (s->p->columns + group - 1) / group;
    uint8_t *chunks = out + groups * PANEL_LANES * 2;
    float_group g;
    for (int64_t i = 0; i < groups; i++) {
        load_importance(s, i * group, g.importance);
        for (int64_t lane = 0; lane < PANEL_LANES; lane++) {
            uint8_t *to = chunks + i * group / 8 * bits * PANEL_LANES + lane * 4;
            load_group(s, first + lane, i * group, g.x);
            if (encode_group(&g, group, top, bits, weighed, out + (i * PANEL_LANES + lane) * 2, to)) return 1;
        }
    }
    return 0;
}

/* Sizes that the compiler knows, so that a group stays in registers. */
static int encode_one(const float_source *s, int64_t first, uint8_t *out) {
    const colibri_packing *p = s->p;
    const float top = (float)(1 << (p->bits - 1));
    const int group = (int)p->group, weighed = s->importance != NULL;
    if (group == 64 && p->bits == 4 && !weighed) return encode_panel(s, first, 64, 8.0f, 4, 0, out);
    if (group == 64 && p->bits == 8 && !weighed) return encode_panel(s, first, 64, 128.0f, 8, 0, out);
    if (group == 64 && weighed) return encode_panel(s, first, 64, top, p->bits, 1, out);
    return encode_panel(s, first, group, top, p->bits, weighed, out);
}

static int32_t encode(const colibri_packing *p, const uint8_t *const *pieces, uint8_t *out) {
    const float_source s = {p, pieces[p->items.piece] + p->items.start,
                            p->scales.piece < 0 ? NULL : pieces[p->scales.piece] + p->scales.start,
                            p->importance < 0 ? NULL : pieces[p->importance]};
    for (int64_t first = 0; first < p->rows; first += PANEL_LANES, out += p->panel_stride) {
        if (encode_one(&s, first, out)) return 1;
    }
    return 0;
}

#endif
