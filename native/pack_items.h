/* Items of what files hold, read one by one. */
#ifndef COLIBRI_PACK_ITEMS_H
#define COLIBRI_PACK_ITEMS_H

#include "colibri.h"
#include "kern_math.h"

enum { ITEM_F32, ITEM_F16, ITEM_BF16, ITEM_E8M0, ITEM_E4M3, ITEM_NIBBLE, ITEM_BLOCK = 64 }; /* kinds of items, as in formats/packing.py */

/* Files promise no alignment, hence the types. */
typedef uint16_t __attribute__((aligned(1), may_alias)) loose16;
typedef uint32_t __attribute__((aligned(1), may_alias)) loose32;

static inline int64_t item_nbytes(int64_t kind) { return kind == ITEM_F32 ? 4 : kind == ITEM_F16 || kind == ITEM_BF16 ? 2 : 1; }

static inline float e4m3_to_float(uint8_t code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = (code & 0x7f) == 0x7f ? float_of(0x7fc00000)
                       : exponent == 0       ? (float)mantissa * 0x1p-9f
                                             : float_of((exponent + 120) << 23 | mantissa << 20);
    return code & 0x80 ? -size : size;
}

static inline float item_at(const uint8_t *p, int64_t kind) {
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

#endif
