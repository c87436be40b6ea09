/* Inputs coded for one group size: integers and one scale for each group of K. */
#ifndef COLIBRI_KERN_CODE_H
#define COLIBRI_KERN_CODE_H

#include "kern_vec.h"

/* 16-bit codes stand within each four as 0 2 1 3, the order in which a panel's bytes come apart into 16-bit pairs; 8-bit
   codes stand in order. */
typedef struct {
    uint8_t *codes; /* [rows, padded K] of two bytes or one */
    float *scales;  /* [rows, padded K / group] */
    int32_t *sums;  /* [rows, padded K / group] sum of the codes, for weights whose codes are kept with an offset */
    int64_t groups; /* padded K / group */
    int wide;       /* two bytes */
    int32_t *halves; /* [rows, padded K / 16] sums of the codes of half a group of 32, for weights in groups of 16; else NULL */
} coded;

/* Sixteen 32-bit integers: the bits of magnitudes, whose order is the order of magnitudes, or rounded floats. */
#if defined(VEC_AVX512)
typedef __m512i vc16;

INLINE vc16 vc16_zero(void) { return _mm512_setzero_si512(); }
INLINE vc16 vc16_magnitudes(const float *x) { return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff)); }
INLINE vc16 vc16_max(vc16 a, vc16 b) { return _mm512_max_epi32(a, b); }
INLINE vc16 vc16_add(vc16 a, vc16 b) { return _mm512_add_epi32(a, b); }
INLINE int32_t vc16_most(vc16 a) { return _mm512_reduce_max_epi32(a); }
INLINE int32_t vc16_total(vc16 a) { return _mm512_reduce_add_epi32(a); }
INLINE vc16 vc16_rounded(const float *x, float factor) {
    const __m512 magic = _mm512_set1_ps(ROUND_MAGIC);
    const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)), magic);
    return _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(magic));
}
INLINE void vc16_store_bytes(uint8_t *p, vc16 a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
INLINE void vc16_store_pairs(uint8_t *p, vc16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_shuffle_epi32(a, _MM_PERM_DBCA)));
}

#elif defined(VEC_AVX2)
typedef struct { __m256i a, b; } vc16;

INLINE __m256i eight_magnitudes(const float *x) { return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), _mm256_set1_epi32(0x7fffffff)); }
INLINE __m256i eight_rounded(const float *x, float factor) {
    const __m256 magic = _mm256_set1_ps(ROUND_MAGIC);
    const __m256 shifted = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor)), magic);
    return _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(magic));
}

INLINE vc16 vc16_zero(void) { return (vc16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE vc16 vc16_magnitudes(const float *x) { return (vc16){eight_magnitudes(x), eight_magnitudes(x + 8)}; }
INLINE vc16 vc16_max(vc16 x, vc16 y) { return (vc16){_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
INLINE vc16 vc16_add(vc16 x, vc16 y) { return (vc16){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE int32_t vc16_most(vc16 x) {
    const __m256i eight = _mm256_max_epi32(x.a, x.b);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
INLINE int32_t vc16_total(vc16 x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
INLINE vc16 vc16_rounded(const float *x, float factor) { return (vc16){eight_rounded(x, factor), eight_rounded(x + 8, factor)}; }
INLINE __m256i vc16_halves(vc16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); } /* in order */
INLINE void vc16_store_bytes(uint8_t *p, vc16 x) {
    const __m256i halves = vc16_halves(x);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
INLINE void vc16_store_pairs(uint8_t *p, vc16 x) {
    x = (vc16){_mm256_shuffle_epi32(x.a, 0xd8), _mm256_shuffle_epi32(x.b, 0xd8)};
    _mm256_storeu_si256((__m256i *)p, vc16_halves(x));
}

#else
typedef struct { int32_t i[16]; } vc16;

INLINE vc16 vc16_zero(void) { return (vc16){{0}}; }
INLINE vc16 vc16_magnitudes(const float *x) { vc16 r; EACH16(r.i[l] = (int32_t)(bits_of(x[l]) & 0x7fffffff)); return r; }
INLINE vc16 vc16_max(vc16 a, vc16 b) { EACH16(a.i[l] = a.i[l] > b.i[l] ? a.i[l] : b.i[l]); return a; }
INLINE vc16 vc16_add(vc16 a, vc16 b) { EACH16(a.i[l] += b.i[l]); return a; }
INLINE int32_t vc16_most(vc16 a) {
    int32_t most = a.i[0];
    EACH16(most = a.i[l] > most ? a.i[l] : most);
    return most;
}
INLINE int32_t vc16_total(vc16 a) {
    int32_t total = 0;
    EACH16(total += a.i[l]);
    return total;
}
INLINE vc16 vc16_rounded(const float *x, float factor) {
    vc16 r;
    EACH16(r.i[l] = (int32_t)(bits_of(x[l] * factor + ROUND_MAGIC) - bits_of(ROUND_MAGIC)));
    return r;
}
INLINE void vc16_store_bytes(uint8_t *p, vc16 a) { EACH16(p[l] = (uint8_t)a.i[l]); }
INLINE void vc16_store_pairs(uint8_t *p, vc16 a) {
    int16_t halves[16];
    EACH16(halves[l] = (int16_t)a.i[(l & ~3) | (l & 1) << 1 | (l >> 1 & 1)]);
    memcpy(p, halves, sizeof halves);
}
#endif

/* Codes x [group]: q = rint(x * (top / max)), scale = max / top. A group that is not finite gets a NaN for its scale and so
   poisons its row; one below 1e-30 counts as zero. `halves` of a group of 32, unless NULL, are summed too. */
INLINE void code_group(const float *x, int group, float top, int wide, uint8_t *codes, float *scale, int32_t *sum, int32_t *halves) {
    vc16 most = vc16_zero(), total = vc16_zero();
    UNROLL for (int i = 0; i < group; i += 16) most = vc16_max(most, vc16_magnitudes(x + i));
    const int32_t bits = vc16_most(most);
    const float max = float_of((uint32_t)bits);
    const int finite = bits < 0x7f800000;
    if (!finite || !(max > 1e-30f)) {
        memset(codes, 0, (size_t)group * (wide ? 2 : 1));
        if (halves) halves[0] = halves[1] = 0;
        *sum = 0, *scale = finite ? 0.0f : float_of(0x7fc00000);
        return;
    }
    const float factor = top / max;
    UNROLL for (int i = 0; i < group; i += 16) {
        const vc16 rounded = vc16_rounded(x + i, factor);
        total = vc16_add(total, rounded);
        if (halves) halves[i / 16] = vc16_total(rounded);
        if (wide) vc16_store_pairs(codes + 2 * i, rounded);
        else vc16_store_bytes(codes + i, rounded);
    }
    *sum = vc16_total(total), *scale = max / top;
}

/* Group g of a row whose floats start at x (column 0) and end at K; what lies beyond counts as zero. */
INLINE void code_one(const coded *c, int64_t row, const float *x, int64_t K, int group, int wide, float top, int64_t g) {
    const int64_t left = K - g * group, i = row * c->groups + g;
    uint8_t *codes = c->codes + i * group * (wide ? 2 : 1);
    int32_t *halves = group == 32 && c->halves ? c->halves + 2 * i : NULL;
    if (left >= group) {
        code_group(x + g * group, group, top, wide, codes, c->scales + i, c->sums + i, halves);
    } else {
        float padded[128] = {0};
        memcpy(padded, x + g * group, (size_t)left * sizeof *x);
        code_group(padded, group, top, wide, codes, c->scales + i, c->sums + i, halves);
    }
}

INLINE void code_groups(const coded *c, int64_t row, const float *x, int64_t K, int group, float top, int64_t first, int64_t last) {
    for (int64_t g = first; g < last; g++) {
        if (c->wide) code_one(c, row, x, K, group, 1, top, g);
        else code_one(c, row, x, K, group, 0, top, g);
    }
}

/* Codes groups [first, last) of row `row`. */
static void code_row(const coded *c, int64_t row, const float *x, int64_t K, int64_t group, float top, int64_t first, int64_t last) {
    if (group == 32) code_groups(c, row, x, K, 32, top, first, last);
    else if (group == 64) code_groups(c, row, x, K, 64, top, first, last);
    else code_groups(c, row, x, K, 128, top, first, last);
}

#endif
