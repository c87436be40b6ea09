/* Packing of abi_pack.cdef; the twin of formats/packing.py, bit for bit. */
#include "colibri.h"
#include "kern_table.h"
#include "pack_items.h"
#include "pack_blocks.h"

#include <math.h>

enum { LANES = 8 /* rows of a panel */, TILE = 16 };

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
        return colibri_best_table()->encode(p, pieces, out);
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
