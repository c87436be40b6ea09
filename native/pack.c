/* Packing of abi_pack.cdef; the twin of formats/packing.py, bit for bit. */
#include "colibri.h"
#include "kern_math.h"
#include "pack_blocks.h"

#include <math.h>

enum { ITEM_F32, ITEM_F16, ITEM_BF16, ITEM_E8M0, ITEM_E4M3, ITEM_NIBBLE, ITEM_BLOCK = 64 }; /* kinds of items, as in formats/packing.py */
enum { LANES = 8 /* rows of a panel */, MOST_GROUP = 128, TILE = 16 };

/* Files promise no alignment, hence the types. */
typedef uint16_t __attribute__((aligned(1), may_alias)) loose16;
typedef uint32_t __attribute__((aligned(1), may_alias)) loose32;

static int64_t item_nbytes(int64_t kind) { return kind == ITEM_F32 ? 4 : kind == ITEM_F16 || kind == ITEM_BF16 ? 2 : 1; }

static float e4m3_to_float(uint8_t code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = (code & 0x7f) == 0x7f ? float_of(0x7fc00000)
                       : exponent == 0       ? (float)mantissa * 0x1p-9f
                                             : float_of((exponent + 120) << 23 | mantissa << 20);
    return code & 0x80 ? -size : size;
}

static float item_at(const uint8_t *p, int64_t kind) {
    uint16_t half;
    float single;
    switch (kind) {
    case ITEM_F32:
        memcpy(&single, p, sizeof single);
        return single;
    case ITEM_E8M0:
        return ue8m0_to_float(*p);
    case ITEM_E4M3:
        return e4m3_to_float(*p);
    default:
        memcpy(&half, p, sizeof half);
        return kind == ITEM_F16 ? half_to_float(half) : bf16_to_float(half);
    }
}

static int is_finite(float x) { return (bits_of(x) & 0x7f800000) != 0x7f800000; }

/* ---- Items as they are, row by row. */

static void move_tile(const uint8_t *from, int64_t row_step, int64_t column_step, int64_t rows, int64_t columns, int64_t size,
                      uint8_t *out, int64_t out_row) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) memcpy(out + r * out_row + c * size, from + r * row_step + c * column_step, (size_t)size);
    }
}

static void move_items(const colibri_packing *p, const uint8_t *from, uint8_t *out) {
    const int64_t size = item_nbytes(p->items.kind), out_row = p->columns * size;
    for (int64_t r = 0; r < p->rows; r += TILE) {
        const int64_t rows = p->rows - r < TILE ? p->rows - r : TILE;
        if (p->items.column_step == size) {
            for (int64_t i = r; i < r + rows; i++) memcpy(out + i * out_row, from + i * p->items.row_step, (size_t)out_row);
            continue;
        }
        for (int64_t c = 0; c < p->columns; c += TILE) { /* tiles, so that a cache line of a transposed matrix serves several rows */
            const int64_t columns = p->columns - c < TILE ? p->columns - c : TILE;
            const uint8_t *at = from + r * p->items.row_step + c * p->items.column_step;
            uint8_t *to = out + r * out_row + c * size;
            if (size == 4) move_tile(at, p->items.row_step, p->items.column_step, rows, columns, 4, to, out_row);
            else if (size == 2) move_tile(at, p->items.row_step, p->items.column_step, rows, columns, 2, to, out_row);
            else move_tile(at, p->items.row_step, p->items.column_step, rows, columns, 1, to, out_row);
        }
    }
}

/* ---- Items widened to float32, each for a block of the result. */

static int widen_items(const colibri_packing *p, const uint8_t *from, uint8_t *out) {
    int bad = 0;
    for (int64_t r = 0; r < p->rows; r++) {
        const uint8_t *row = from + r / p->block_rows * p->items.row_step;
        for (int64_t c = 0; c < p->columns; c++) {
            const float value = item_at(row + c / p->block_columns * p->items.column_step, p->items.kind);
            bad |= !is_finite(value);
            memcpy(out + (r * p->columns + c) * 4, &value, sizeof value);
        }
    }
    return bad;
}

/* ---- Nibbles into panels. */

/* Codes k = 0 … 7, low half first, to the order of a chunk: 0 4 1 5 2 6 3 7. */
static uint32_t shuffled(uint32_t x) {
    x = (x & 0xff0000ffu) | (x & 0x0000ff00u) << 8 | (x >> 8 & 0x0000ff00u);
    return (x & 0xf00ff00fu) | (x & 0x00f000f0u) << 4 | (x >> 4 & 0x00f000f0u);
}

static void panel_scales(const colibri_packing *p, const uint8_t *from, int64_t first, int64_t groups, int64_t size, uint8_t *to) {
    for (int64_t lane = 0; lane < LANES; lane++) {
        const uint8_t *row = from + (first + lane) * p->scales.row_step;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *scale = to + (g * LANES + lane) * size;
            if (first + lane >= p->rows) memset(scale, 0, (size_t)size);
            else memcpy(scale, row + g * p->scales.column_step, (size_t)size);
        }
    }
}

static void pack_panels(const colibri_packing *p, const uint8_t *const *pieces, uint8_t *out) {
    const uint8_t *codes = pieces[p->items.piece] + p->items.start, *scales = pieces[p->scales.piece] + p->scales.start;
    const int64_t groups = (p->columns + p->group - 1) / p->group, size = item_nbytes(p->scales.kind), row_nbytes = p->columns / 2;
    const int64_t chunks = groups * p->group / 8, whole = row_nbytes / 4;
    for (int64_t first = 0; first < p->rows; first += LANES, out += p->panel_stride) {
        panel_scales(p, scales, first, groups, size, out);
        uint8_t *to = out + groups * LANES * size;
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int is_row = first + lane < p->rows;
            const uint8_t *row = codes + (first + lane) * p->items.row_step;
            uint32_t word;
            for (int64_t c = 0; c < chunks; c++) {
                memset(&word, (int)p->zero, sizeof word);
                if (is_row && c < whole) memcpy(&word, row + c * 4, sizeof word);
                else if (is_row && c == whole) memcpy(&word, row + c * 4, (size_t)(row_nbytes % 4));
                word = shuffled(word);
                memcpy(to + (c * LANES + lane) * 4, &word, sizeof word);
            }
        }
    }
}

/* ---- Floats rounded to integer codes, as IntegerFormat.encode does it. */

typedef struct {
    const colibri_packing *p;
    const uint8_t *items, *scales, *importance; /* NULL: none */
} float_source;

/* Row `row`, columns from `first` on, as floats; zeros from the last column or row on. */
static void load_group(const float_source *s, int64_t row, int64_t first, float *x) {
    const colibri_packing *p = s->p;
    const colibri_items *items = &p->items;
    const int64_t left = row < p->rows ? p->columns - first : 0, n = left < p->group ? left : p->group;
    const uint8_t *from = s->items + row * items->row_step + first * items->column_step;
    for (int64_t k = n > 0 ? n : 0; k < p->group; k++) x[k] = 0.0f;
    if (items->kind == ITEM_BF16 && items->column_step == 2) { /* the usual case */
        for (int64_t k = 0; k < n; k++) x[k] = bf16_to_float(((const loose16 *)from)[k]);
    } else if (items->kind == ITEM_BF16) {
        for (int64_t k = 0; k < n; k++) x[k] = item_at(from + k * items->column_step, ITEM_BF16);
    } else {
        for (int64_t k = 0; k < n; k++) x[k] = item_at(from + k * items->column_step, items->kind);
    }
    if (!s->scales || n <= 0) return;
    const uint8_t *scales = s->scales + row / p->block_rows * p->scales.row_step;
    for (int64_t k = 0; k < n; k++) x[k] *= item_at(scales + (first + k) / p->block_columns * p->scales.column_step, p->scales.kind);
}

/* Four floats at once: every instruction set has that. */
typedef float four __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));

static inline __attribute__((always_inline)) four load_four(const float *x) {
    four v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline __attribute__((always_inline)) four chosen(four_ints mask, four a, four b) {
    return (four)((mask & (four_ints)a) | (~mask & (four_ints)b));
}

/* x * inverse to the nearest code, as floats. */
static inline __attribute__((always_inline)) four codes_of(four x, float inverse, float top) {
    const four magic = {ROUND_MAGIC, ROUND_MAGIC, ROUND_MAGIC, ROUND_MAGIC};
    const four least = {-top, -top, -top, -top}, most = {top - 1, top - 1, top - 1, top - 1};
    const four q = (x * inverse + magic) - magic, above = chosen(q > least, q, least);
    return chosen(above < most, above, most);
}

typedef struct {
    const float *x, *importance; /* importance NULL: all alike */
    int64_t group;
    float top;
} group_of;

static float sum_of(four low, four high) {
    return ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
}

/* What rounding by `scale` misses: sum w (q s - x)^2. */
static inline __attribute__((always_inline)) float missed(const group_of *g, float scale, int weighed) {
    const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
    four low = {0}, high = {0};
    for (int64_t k = 0; k < g->group; k += 8) {
        const four a = load_four(g->x + k), b = load_four(g->x + k + 4);
        const four first = codes_of(a, inverse, g->top) * scale - a, second = codes_of(b, inverse, g->top) * scale - b;
        low += weighed ? load_four(g->importance + k) * (first * first) : first * first;
        high += weighed ? load_four(g->importance + k + 4) * (second * second) : second * second;
    }
    return sum_of(low, high);
}

/* The scale that fits best to the codes which `scale` gives: sum w q x / sum w q q. */
static inline __attribute__((always_inline)) float fitted(const group_of *g, float scale, int weighed) {
    const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
    four above[2] = {{0}, {0}}, below[2] = {{0}, {0}};
    for (int64_t k = 0; k < g->group; k += 8) {
        for (int64_t i = 0; i < 2; i++) {
            const four x = load_four(g->x + k + 4 * i), q = codes_of(x, inverse, g->top);
            above[i] += weighed ? load_four(g->importance + k + 4 * i) * (q * x) : q * x;
            below[i] += weighed ? load_four(g->importance + k + 4 * i) * (q * q) : q * q;
        }
    }
    const float wanted = sum_of(above[0], above[1]), by = sum_of(below[0], below[1]);
    return by > 0 ? wanted / by : 0.0f;
}

typedef struct {
    uint16_t scale;
    float least;
} found_scale;

static inline __attribute__((always_inline)) void try_scale(const group_of *g, float wanted, int weighed, found_scale *best) {
    const float largest = 65504.0f;
    const uint16_t scale = float_to_half(wanted > largest ? largest : wanted < -largest ? -largest : wanted);
    const float error = missed(g, half_to_float(scale), weighed);
    if (error < best->least) best->least = error, best->scale = scale;
}

/* The scale of least error: among some that map the largest weight to another code, more of them where weights differ in
   importance, and that which fits the codes of the best of these. */
static inline __attribute__((always_inline)) uint16_t scale_of(const group_of *g, int weighed) {
    const float top = g->top, few[6] = {-top, top - 1, -(top - 1), -(top - 0.5f), top - 0.5f, -(top + 0.5f)};
    float extreme = g->x[0];
    found_scale best = {0, INFINITY};
    for (int64_t k = 1; k < g->group; k++) {
        if (fabsf(g->x[k]) > fabsf(extreme)) extreme = g->x[k];
    }
    for (int i = 0; i < 6; i++) try_scale(g, extreme / few[i], weighed, &best);
    for (int i = 0; weighed && i < 34; i++) {
        const float divisor = top * (0.75f + (float)(i / 2) / 32.0f);
        try_scale(g, extreme / (i % 2 ? divisor : -divisor), weighed, &best);
    }
    try_scale(g, fitted(g, half_to_float(best.scale), weighed), weighed, &best);
    return best.scale;
}

static uint16_t best_scale(const group_of *g) { return g->importance ? scale_of(g, 1) : scale_of(g, 0); }

/* Codes of one row's group, at `chunks` in steps of a chunk. */
static void put_codes(const float *x, int64_t group, float inverse, float top, int64_t bits, uint8_t *chunks) {
    for (int64_t k = 0; k < group; k += 8, chunks += LANES * bits) {
        const four_ints low = __builtin_convertvector(codes_of(load_four(x + k), inverse, top), four_ints);
        const four_ints high = __builtin_convertvector(codes_of(load_four(x + k + 4), inverse, top), four_ints);
        for (int i = 0; i < 4; i++) {
            if (bits == 4) chunks[i] = (uint8_t)((low[i] + 8) | (high[i] + 8) << 4);
            else chunks[i] = (uint8_t)low[i], chunks[LANES * 4 + i] = (uint8_t)high[i];
        }
    }
}

/* How much each of the columns from `first` on matters; those behind the last do not. */
static const float *load_importance(const float_source *s, int64_t first, float *to) {
    if (!s->importance) return NULL;
    const int64_t left = s->p->columns - first, n = left < s->p->group ? left : s->p->group;
    memset(to, 0, (size_t)s->p->group * sizeof *to);
    memcpy(to, s->importance + first * 4, (size_t)n * sizeof *to);
    return to;
}

static int encode_panel(const float_source *s, int64_t first, uint8_t *out) {
    const colibri_packing *p = s->p;
    const int64_t groups = (p->columns + p->group - 1) / p->group;
    const float top = (float)(1 << (p->bits - 1)), most = 65504.0f * top;
    uint8_t *chunks = out + groups * LANES * 2;
    for (int64_t g = 0; g < groups; g++) {
        float x[MOST_GROUP], importance[MOST_GROUP];
        const group_of group = {x, load_importance(s, g * p->group, importance), p->group, top};
        for (int64_t lane = 0; lane < LANES; lane++) {
            int bad = 0;
            load_group(s, first + lane, g * p->group, x);
            for (int64_t k = 0; k < p->group; k++) bad |= !(fabsf(x[k]) <= most);
            if (bad) return 1;
            const uint16_t scale = best_scale(&group);
            const float wide = half_to_float(scale), inverse = wide == 0 ? 0.0f : 1.0f / wide;
            memcpy(out + (g * LANES + lane) * 2, &scale, sizeof scale);
            put_codes(x, p->group, inverse, top, p->bits, chunks + (g * p->group / 8 * p->bits * LANES) + lane * 4);
        }
    }
    return 0;
}

static int encode(const colibri_packing *p, const uint8_t *const *pieces, uint8_t *out) {
    const float_source s = {p, pieces[p->items.piece] + p->items.start,
                            p->scales.piece < 0 ? NULL : pieces[p->scales.piece] + p->scales.start,
                            p->importance < 0 ? NULL : pieces[p->importance]};
    for (int64_t first = 0; first < p->rows; first += LANES, out += p->panel_stride) {
        if (encode_panel(&s, first, out)) return 1;
    }
    return 0;
}

int32_t colibri_pack(const colibri_packing *p, const uint8_t *const *pieces, uint8_t *out) {
    const uint8_t *from = pieces[p->items.piece] + p->items.start;
    switch (p->kind) {
    case COLIBRI_PACK_MOVE:
        move_items(p, from, out);
        return 0;
    case COLIBRI_PACK_FLOATS:
        return widen_items(p, from, out);
    case COLIBRI_PACK_PANELS:
        pack_panels(p, pieces, out);
        return 0;
    case COLIBRI_PACK_BLOCKS:
        pack_blocks(p, p->items.kind - ITEM_BLOCK, from, out);
        return 0;
    default:
        return encode(p, pieces, out);
    }
}

/* ---- What is not finite. */

static int finite16(const uint8_t *data, int64_t nbytes, uint16_t exponent) {
    const loose16 *items = (const loose16 *)data;
    uint16_t bad = 0;
    for (int64_t i = 0; i < nbytes / 2; i++) bad |= (items[i] & exponent) == exponent;
    return !bad;
}

static int finite32(const uint8_t *data, int64_t nbytes) {
    const loose32 *items = (const loose32 *)data;
    uint32_t bad = 0;
    for (int64_t i = 0; i < nbytes / 4; i++) bad |= (items[i] & 0x7F800000u) == 0x7F800000u;
    return !bad;
}

/* One byte stands for NaN: 0xFF in E8M0, 0x7F with either sign in E4M3. */
static int finite8(const uint8_t *data, int64_t nbytes, uint8_t nan) {
    uint8_t bad = 0;
    for (int64_t i = 0; i < nbytes; i++) bad |= (data[i] & nan) == nan;
    return !bad;
}

static int run_is_finite(const uint8_t *data, int64_t nbytes, int64_t kind) {
    switch (kind) {
    case ITEM_F32:
        return finite32(data, nbytes);
    case ITEM_E8M0:
        return finite8(data, nbytes, 0xFF);
    case ITEM_E4M3:
        return finite8(data, nbytes, 0x7F);
    default:
        return finite16(data, nbytes, kind == ITEM_F16 ? 0x7C00 : 0x7F80);
    }
}

int32_t colibri_all_finite(const uint8_t *data, int64_t nbytes, int64_t stride, int64_t count, int64_t kind) {
    for (int64_t i = 0; i < count; i++) {
        if (!run_is_finite(data + i * stride, nbytes, kind)) return 0;
    }
    return 1;
}
