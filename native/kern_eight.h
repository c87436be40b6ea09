/* Eight floats that are added lane by lane, in one register or two; for code that must give the bits of a plain loop. */
#ifndef COLIBRI_KERN_EIGHT_H
#define COLIBRI_KERN_EIGHT_H

#include "kern_vec.h"

#if defined(VEC_AVX2)
typedef __m256 eight;

INLINE eight eight_set1(float a) { return _mm256_set1_ps(a); }
INLINE eight eight_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void eight_store(float *p, eight a) { _mm256_storeu_ps(p, a); }
INLINE eight eight_add(eight a, eight b) { return _mm256_add_ps(a, b); }
INLINE eight eight_sub(eight a, eight b) { return _mm256_sub_ps(a, b); }
INLINE eight eight_mul(eight a, eight b) { return _mm256_mul_ps(a, b); }
INLINE eight eight_div(eight a, eight b) { return _mm256_div_ps(a, b); }
INLINE eight eight_max(eight a, eight b) { return _mm256_max_ps(a, b); } /* b where they do not compare */
INLINE eight eight_min(eight a, eight b) { return _mm256_min_ps(a, b); }
INLINE eight eight_abs(eight a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE int eight_all_within(eight a, eight b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)) == 255; }
INLINE void eight_integers(int32_t *p, eight a) { _mm256_storeu_si256((__m256i *)p, _mm256_cvttps_epi32(a)); }
INLINE eight eight_bf16(const void *p) { return vf8_bf16(p); }
/* Nearest half-precision floats, and those as floats. */
INLINE eight eight_halves(uint16_t *p, eight a) {
    const __m128i halves = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)p, halves);
    return _mm256_cvtph_ps(halves);
}

#else
typedef float four __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));
typedef struct { four a, b; } eight;

INLINE four four_chosen(four_ints mask, four a, four b) { return (four)((mask & (four_ints)a) | (~mask & (four_ints)b)); }
INLINE int four_all(four_ints mask) { return mask[0] && mask[1] && mask[2] && mask[3]; }
INLINE eight eight_set1(float a) { return (eight){{a, a, a, a}, {a, a, a, a}}; }
INLINE eight eight_load(const float *p) { eight r; memcpy(&r.a, p, 16), memcpy(&r.b, p + 4, 16); return r; }
INLINE void eight_store(float *p, eight x) { memcpy(p, &x.a, 16), memcpy(p + 4, &x.b, 16); }
INLINE eight eight_add(eight x, eight y) { return (eight){x.a + y.a, x.b + y.b}; }
INLINE eight eight_sub(eight x, eight y) { return (eight){x.a - y.a, x.b - y.b}; }
INLINE eight eight_mul(eight x, eight y) { return (eight){x.a * y.a, x.b * y.b}; }
INLINE eight eight_div(eight x, eight y) { return (eight){x.a / y.a, x.b / y.b}; }
INLINE eight eight_max(eight x, eight y) { return (eight){four_chosen(x.a > y.a, x.a, y.a), four_chosen(x.b > y.b, x.b, y.b)}; }
INLINE eight eight_min(eight x, eight y) { return (eight){four_chosen(x.a < y.a, x.a, y.a), four_chosen(x.b < y.b, x.b, y.b)}; }
INLINE eight eight_abs(eight x) { return (eight){(four)((four_ints)x.a & 0x7fffffff), (four)((four_ints)x.b & 0x7fffffff)}; }
INLINE int eight_all_within(eight x, eight y) { return four_all(x.a <= y.a) && four_all(x.b <= y.b); }
INLINE void eight_integers(int32_t *p, eight x) {
    const four_ints a = __builtin_convertvector(x.a, four_ints), b = __builtin_convertvector(x.b, four_ints);
    memcpy(p, &a, 16), memcpy(p + 4, &b, 16);
}
INLINE eight eight_bf16(const void *p) {
    float r[8];
    vf8_store(r, vf8_bf16(p));
    return eight_load(r);
}
INLINE eight eight_halves(uint16_t *p, eight x) {
    float r[8];
    eight_store(r, x);
    for (int l = 0; l < 8; l++) p[l] = float_to_half(r[l]), r[l] = half_to_float(p[l]);
    return eight_load(r);
}
#endif

/* The sum of eight sums: neighbours, then pairs, then halves. */
INLINE float eight_sum(eight x) {
    float a[8];
    eight_store(a, x);
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

#endif
