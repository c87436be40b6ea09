/* Blocks of GGUF files to panels, no number changed; the twin of formats/ggml.py, which says what is where, bit for bit. */
#include "pack_blocks.h"
#include "kern_math.h"

enum { LANES = 8 /* rows of a panel */, CHUNK = 32, MOST_BLOCK = 256 };
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, MXFP4 = 39 };

typedef struct {
    int number, block, nbytes;
} block_type;

static const block_type TYPES[] = {
    {Q4_0, 32, 18},  {Q4_1, 32, 20},  {Q5_0, 32, 22},  {Q5_1, 32, 24},  {Q8_0, 32, 34},   {Q2_K, 256, 84},
    {Q3_K, 256, 110}, {Q4_K, 256, 144}, {Q5_K, 256, 176}, {Q6_K, 256, 210}, {IQ4_NL, 32, 18}, {MXFP4, 32, 17},
};

static uint32_t word(const uint8_t *p) {
    uint32_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return half_to_float(half);
}

static void put(uint8_t *to, uint32_t w) { memcpy(to, &w, sizeof w); }

/* Chunks of `width` bytes: first their low nibbles, then the high ones. */
static void put_nibbles(const uint8_t *from, int width, uint8_t *to) {
    const uint32_t low = 0x0f0f0f0f;
    for (int c = 0; c < width / 8; c++) {
        const uint32_t a = word(from + 8 * c), b = word(from + 8 * c + 4);
        put(to + c * CHUNK, (a & low) | (b & low) << 4);
        put(to + (width / 8 + c) * CHUNK, (a >> 4 & low) | (b & ~low));
    }
}

static void put_bytes(const uint8_t *codes, int count, uint8_t *to) {
    for (int c = 0; c < count / 4; c++) memcpy(to + c * CHUNK, codes + 4 * c, 4);
}

/* Where a lane of a block goes: block b of B of a row. */
typedef struct {
    uint8_t *panel;
    int64_t lane, b, B;
} place;

static void put_half(const place *at, int64_t first, const uint8_t *from) { memcpy(at->panel + first + (at->b * LANES + at->lane) * 2, from, 2); }

static uint8_t *codes_at(const place *at, int64_t heads, int64_t nbytes) { return at->panel + at->B * LANES * heads + at->b * LANES * nbytes + at->lane * 4; }

static void put_q4_0(const uint8_t *p, const place *at) {
    put_half(at, 0, p);
    put_nibbles(p + 2, 16, codes_at(at, 2, 16));
}

static void put_q8_0(const uint8_t *p, const place *at) {
    put_half(at, 0, p);
    put_bytes(p + 2, 32, codes_at(at, 2, 32));
}

static void put_mxfp4(const uint8_t *p, const place *at) {
    at->panel[at->b * LANES + at->lane] = p[0];
    put_nibbles(p + 1, 16, codes_at(at, 1, 16));
}

/* Eight scales and eight minima of six bits, out of twelve bytes. */
static void split_scales(const uint8_t *p, uint8_t scales[8], uint8_t minima[8]) {
    for (int j = 0; j < 4; j++) {
        scales[j] = p[j] & 63, minima[j] = p[j + 4] & 63;
        scales[j + 4] = (uint8_t)((p[j + 8] & 15) | p[j] >> 6 << 4);
        minima[j + 4] = (uint8_t)(p[j + 8] >> 4 | p[j + 4] >> 6 << 4);
    }
}

static void put_q4_k(const uint8_t *p, const place *at) {
    uint8_t scales[8], minima[8], *small = at->panel + at->B * LANES * 4 + at->b * LANES * 8 + at->lane;
    split_scales(p + 4, scales, minima);
    put_half(at, 0, p);
    put_half(at, at->B * LANES * 2, p + 2);
    for (int j = 0; j < 8; j++) small[j * LANES] = scales[j], small[at->B * LANES * 8 + j * LANES] = minima[j];
    for (int j = 0; j < 4; j++) put_nibbles(p + 16 + 32 * j, 32, codes_at(at, 20, 128) + j * 8 * CHUNK);
}

static void put_q6_k(const uint8_t *p, const place *at) {
    const uint32_t low = 0x0f0f0f0f, pairs = 0x03030303;
    uint8_t *small = at->panel + at->B * LANES * 2 + at->b * LANES * 16 + at->lane, *to = codes_at(at, 18, 192);
    put_half(at, 0, p + 208);
    for (int j = 0; j < 16; j++) small[j * LANES] = p[192 + j];
    for (int t = 0; t < 16; t++, to += 3 * CHUNK) { /* 16 columns at a time */
        const uint8_t *nibbles = p + t / 8 * 64 + t % 4 * 16, *upper = p + 128 + t / 8 * 32 + t % 2 * 16;
        const int shift = t % 8 / 4 * 4, pair = t % 8 / 2 * 2;
        uint32_t high = 0;
        for (int i = 0; i < 4; i++) high |= (word(upper + 4 * i) >> pair & pairs) << 2 * i;
        for (int i = 0; i < 2; i++) put(to + i * CHUNK, (word(nibbles + 8 * i) >> shift & low) | (word(nibbles + 8 * i + 4) >> shift & low) << 4);
        put(to + 2 * CHUNK, high);
    }
}

/* ---- Types that become codes of 8 bits with float scales and minima. */

typedef struct {
    int group;
    uint8_t codes[MOST_BLOCK];
    float scales[16], minima[16];
} affine;

static void spread_nibbles(const uint8_t *from, int width, uint8_t *codes) {
    for (int i = 0; i < width; i++) codes[i] = from[i] & 15, codes[width + i] = from[i] >> 4;
}

static void add_fifth(const uint8_t *bits, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits[i / 8] >> i % 8 & 1) << 4);
}

static void read_q5(const uint8_t *p, int with_minimum, affine *out) {
    out->scales[0] = half_at(p);
    if (with_minimum) out->minima[0] = half_at(p + 2), p += 2;
    spread_nibbles(p + 6, 16, out->codes);
    add_fifth(p + 2, out->codes);
    for (int i = 0; i < 32 && !with_minimum; i++) out->codes[i] = (uint8_t)(out->codes[i] - 16);
}

static void read_iq4_nl(const uint8_t *p, affine *out) {
    static const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    out->scales[0] = half_at(p);
    spread_nibbles(p + 2, 16, out->codes);
    for (int i = 0; i < 32; i++) out->codes[i] = (uint8_t)values[out->codes[i]];
}

static void read_q5_k(const uint8_t *p, affine *out) {
    const float d = half_at(p), dmin = half_at(p + 2);
    uint8_t scales[8], minima[8];
    split_scales(p + 4, scales, minima);
    for (int j = 0; j < 8; j++) out->scales[j] = d * (float)scales[j], out->minima[j] = -(dmin * (float)minima[j]);
    for (int j = 0; j < 4; j++) spread_nibbles(p + 48 + 32 * j, 32, out->codes + 64 * j);
    for (int i = 0; i < 256; i++) out->codes[i] |= (uint8_t)((p[16 + i % 32] >> i / 32 & 1) << 4);
}

static uint8_t quarter(const uint8_t *p, int i) { return p[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; }

static void read_q2_k(const uint8_t *p, affine *out) {
    const float d = half_at(p + 80), dmin = half_at(p + 82);
    for (int j = 0; j < 16; j++) out->scales[j] = d * (float)(p[j] & 15), out->minima[j] = -(dmin * (float)(p[j] >> 4));
    for (int i = 0; i < 256; i++) out->codes[i] = quarter(p + 16, i);
}

static void read_q3_k(const uint8_t *p, affine *out) {
    const float d = half_at(p + 108);
    for (int j = 0; j < 16; j++) {
        const int low = p[96 + j % 8] >> j / 8 * 4 & 15, high = p[104 + j % 4] >> j / 4 * 2 & 3;
        out->scales[j] = d * (float)((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; i++) out->codes[i] = (uint8_t)(quarter(p + 32, i) + (p[i % 32] >> i / 32 & 1) * 4 - 4);
}

static void read_affine(int number, const uint8_t *p, affine *out) {
    switch (number) {
    case Q4_1:
        out->scales[0] = half_at(p), out->minima[0] = half_at(p + 2);
        spread_nibbles(p + 4, 16, out->codes);
        break;
    case Q5_0:
    case Q5_1:
        read_q5(p, number == Q5_1, out);
        break;
    case IQ4_NL:
        read_iq4_nl(p, out);
        break;
    case Q5_K:
        read_q5_k(p, out);
        break;
    case Q2_K:
        read_q2_k(p, out);
        break;
    default:
        read_q3_k(p, out);
    }
}

static void put_affine(const block_type *type, const uint8_t *p, const place *at) {
    affine found = {.group = type->number == Q2_K || type->number == Q3_K ? 16 : 32};
    const int64_t groups = type->block / found.group, all = at->B * groups;
    read_affine(type->number, p, &found);
    for (int64_t j = 0; j < groups; j++) {
        uint8_t *to = at->panel + ((at->b * groups + j) * LANES + at->lane) * 4;
        memcpy(to, &found.scales[j], 4);
        memcpy(to + all * LANES * 4, &found.minima[j], 4);
    }
    put_bytes(found.codes, type->block, codes_at(at, groups * 8, type->block));
}

static void put_block(const block_type *type, const uint8_t *p, const place *at) {
    switch (type->number) {
    case Q4_0:
        put_q4_0(p, at);
        break;
    case Q8_0:
        put_q8_0(p, at);
        break;
    case MXFP4:
        put_mxfp4(p, at);
        break;
    case Q4_K:
        put_q4_k(p, at);
        break;
    case Q6_K:
        put_q6_k(p, at);
        break;
    default:
        put_affine(type, p, at);
    }
}

void pack_blocks(const colibri_packing *p, int64_t number, const uint8_t *from, uint8_t *out) {
    static const uint8_t zeros[MOST_BLOCK]; /* rows that fill the last panel */
    const block_type *type = TYPES;
    while (type->number != number) type++;
    for (int64_t first = 0; first < p->rows; first += LANES, out += p->panel_stride) {
        place at = {out, 0, 0, p->columns / type->block};
        for (at.b = 0; at.b < at.B; at.b++) {
            for (at.lane = 0; at.lane < LANES; at.lane++) {
                const uint8_t *row = from + (first + at.lane) * p->items.row_step + at.b * type->nbytes;
                put_block(type, first + at.lane < p->rows ? row : zeros, &at);
            }
        }
    }
}
