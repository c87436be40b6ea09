/* A thin vector header: sixteen floats (vf16), eight floats (vf8) and eight 32-bit integers (vi8).
   Each operation gives the same bits in all three spellings; only these lines know an instruction set. */
#ifndef COLIBRI_KERN_VEC_H
#define COLIBRI_KERN_VEC_H

#include <stdint.h>
#include <string.h>

#include "kern_math.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8") /* or sums that a loop runs over live in memory, not in registers */

/* Memory is asked for in stripes of four pages: who works through one 256 bytes at a time, asks each time for as many
   bytes of a stripe further on, a line of each of its pages. A core's own prefetcher follows one stream in each page and
   has too few lines on the way in one; in four pages at once, reading is as fast as it gets. */
enum { STRIPE_NBYTES = 4 * 4096, ASKED_NBYTES = 256 };

/* How far ahead to ask where so many bytes lie between the first and the last place that are read at once. */
INLINE int64_t stripes_ahead(int64_t span) { return (span + 2 * STRIPE_NBYTES - 1) & ~(int64_t)(STRIPE_NBYTES - 1); }

INLINE void ask_ahead(const uint8_t *p, int64_t ahead) {
    const uintptr_t at = (uintptr_t)p;
    const char *line = (const char *)((at & ~(uintptr_t)(STRIPE_NBYTES - 1)) + (at >> 2 & 0xfc0)) + ahead;
    for (int page = 0; page < 4; page++) __builtin_prefetch(line + 4096 * page);
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VEC_AVX2 1
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define VEC_AVX512 1
#endif
#endif
#if defined(VEC_AVX2) && !defined(VEC_AVX512)
#define WIDEN_FIRST 1 /* see kern_widened.h */
#else
#define WIDEN_FIRST 0
#endif

#if defined(VEC_AVX2)
#include <immintrin.h>

#define KEEP(x) __asm__("" : "+x"(x)) /* computed here and kept in a register: no reordering of sums, no second load */

typedef __m256 vf8;
typedef __m256i vi8;

INLINE vf8 vf8_zero(void) { return _mm256_setzero_ps(); }
INLINE vf8 vf8_floats(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf8 vf8_set1(float a) { return _mm256_set1_ps(a); }
INLINE vf8 vf8_mul(vf8 a, vf8 b) { return _mm256_mul_ps(a, b); }
INLINE vf8 vf8_fma(vf8 a, vf8 b, vf8 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf8 vf8_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE vf8 vf8_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE void vf8_store(float *p, vf8 a) { _mm256_storeu_ps(p, a); }

INLINE vi8 vi8_set1(int32_t a) { return _mm256_set1_epi32(a); }
INLINE vi8 vi8_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE vi8 vi8_add(vi8 a, vi8 b) { return _mm256_add_epi32(a, b); }
INLINE vi8 vi8_and(vi8 a, vi8 b) { return _mm256_and_si256(a, b); }
INLINE vi8 vi8_shr(vi8 a, int n) { return _mm256_srli_epi32(a, n); } /* 32 bits, zeros in */
INLINE vi8 vi8_shl(vi8 a, int n) { return _mm256_slli_epi32(a, n); }
INLINE vi8 vi8_sar(vi8 a, int n) { return _mm256_srai_epi32(a, n); } /* 32 bits, sign in */
INLINE vi8 vi8_low_bytes(vi8 a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); } /* of 16 bits, signed */
INLINE vi8 vi8_high_bytes(vi8 a) { return _mm256_srai_epi16(a, 8); }
INLINE vf8 vi8_float(vi8 a) { return _mm256_cvtepi32_ps(a); }

INLINE float sum_eight(vf8 a) { /* i + (i + 4), then i + (i + 2), then the last two */
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE float most_of_eight(__m256 a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

typedef struct { float f[8]; } vf8;
typedef struct { int32_t i[8]; } vi8;
#define EACH8(expression) do { for (int l = 0; l < 8; l++) { expression; } } while (0)

INLINE vf8 vf8_set1(float a) { vf8 r; EACH8(r.f[l] = a); return r; }
INLINE vf8 vf8_zero(void) { return vf8_set1(0.0f); }
INLINE vf8 vf8_mul(vf8 a, vf8 b) { EACH8(a.f[l] *= b.f[l]); return a; }
INLINE vf8 vf8_fma(vf8 a, vf8 b, vf8 c) { EACH8(c.f[l] = __builtin_fmaf(a.f[l], b.f[l], c.f[l])); return c; }
INLINE vf8 vf8_half(const void *p) {
    uint16_t h[8];
    vf8 r;
    memcpy(h, p, sizeof h);
    EACH8(r.f[l] = half_to_float(h[l]));
    return r;
}
INLINE vf8 vf8_bf16(const void *p) {
    uint16_t h[8];
    vf8 r;
    memcpy(h, p, sizeof h);
    EACH8(r.f[l] = bf16_to_float(h[l]));
    return r;
}
INLINE void vf8_store(float *p, vf8 a) { memcpy(p, a.f, sizeof a.f); }

INLINE vi8 vi8_set1(int32_t a) { vi8 r; EACH8(r.i[l] = a); return r; }
INLINE vi8 vi8_load(const void *p) { vi8 r; memcpy(r.i, p, sizeof r.i); return r; }
INLINE vi8 vi8_add(vi8 a, vi8 b) { EACH8(a.i[l] += b.i[l]); return a; }
INLINE vi8 vi8_and(vi8 a, vi8 b) { EACH8(a.i[l] &= b.i[l]); return a; }
INLINE vi8 vi8_shr(vi8 a, int n) { EACH8(a.i[l] = (int32_t)((uint32_t)a.i[l] >> n)); return a; }
INLINE vi8 vi8_shl(vi8 a, int n) { EACH8(a.i[l] = (int32_t)((uint32_t)a.i[l] << n)); return a; }
INLINE vi8 vi8_sar(vi8 a, int n) { EACH8(a.i[l] >>= n); return a; }
INLINE int32_t pair16(int32_t low, int32_t high) { return (int32_t)(((uint32_t)low & 0xffff) | (uint32_t)high << 16); }
INLINE vi8 vi8_low_bytes(vi8 a) { EACH8(a.i[l] = pair16((int8_t)a.i[l], (int8_t)(a.i[l] >> 16))); return a; }
INLINE vi8 vi8_high_bytes(vi8 a) { EACH8(a.i[l] = pair16((int8_t)(a.i[l] >> 8), (int8_t)(a.i[l] >> 24))); return a; }
INLINE vf8 vi8_float(vi8 a) { vf8 r; EACH8(r.f[l] = (float)a.i[l]); return r; }

INLINE float sum_eight(vf8 a) {
    for (int n = 4; n > 0; n /= 2) {
        for (int l = 0; l < n; l++) a.f[l] += a.f[l + n];
    }
    return a.f[0];
}
#endif

#if defined(VEC_AVX512)
typedef __m512 vf16;

INLINE vf16 vf16_zero(void) { return _mm512_setzero_ps(); }
INLINE vf16 vf16_set1(float a) { return _mm512_set1_ps(a); }
INLINE vf16 vf16_f32(const void *p) { return _mm512_loadu_ps(p); }
INLINE vf16 vf16_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vf16 vf16_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE vf16 vf16_add(vf16 a, vf16 b) { return _mm512_add_ps(a, b); }
INLINE vf16 vf16_mul(vf16 a, vf16 b) { return _mm512_mul_ps(a, b); }
INLINE vf16 vf16_fma(vf16 a, vf16 b, vf16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE void vf16_store(float *p, vf16 a) { _mm512_storeu_ps(p, a); }
INLINE vf16 vf16_s8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
/* E4M3 numbers times 2^-8: sign, exponent and mantissa moved into a float16. NaN codes come out as 480 * 2^-8; see vb64. */
INLINE vf16 vf16_fp8(const void *p) {
    const __m256i items = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7); /* the sign now fills two bits */
    const __m256i halves = _mm256_and_si256(items, _mm256_set1_epi16((int16_t)0xbfff));
    return _mm512_cvtph_ps(halves);
}
/* The same of 64 codes. Numbers that are not subnormal (nor zero) need no conversion: their bits are moved into a float32,
   and 112 is added to the exponent, whose upper bits are all clear. */
INLINE vf16 vf16_fp8_normal(const void *p) {
    const __m512i items = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)), 20);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(items, _mm512_set1_epi32((int32_t)0x87f00000), _mm512_set1_epi32(0x38000000), 0xea));
}
INLINE void vf16_fp8_four(const uint8_t *p, vf16 out[4]) {
    if (__builtin_expect(_mm512_testn_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(0x78)) == 0, 1)) {
        UNROLL for (int i = 0; i < 4; i++) out[i] = vf16_fp8_normal(p + 16 * i);
    } else {
        UNROLL for (int i = 0; i < 4; i++) out[i] = vf16_fp8(p + 16 * i);
    }
}
/* The largest magnitude of E4M3 codes, 64 or 16 at a time: 0x7f stands for NaN. */
typedef __m512i vb64;
INLINE vb64 vb64_zero(void) { return _mm512_setzero_si512(); }
INLINE vb64 vb64_add(vb64 most, __m512i codes) { return _mm512_max_epu8(most, _mm512_and_si512(codes, _mm512_set1_epi8(0x7f))); }
INLINE vb64 vb64_most(vb64 most, const void *p) { return vb64_add(most, _mm512_loadu_si512(p)); }
INLINE vb64 vb64_most_16(vb64 most, const void *p) { return vb64_add(most, _mm512_zextsi128_si512(_mm_loadu_si128(p))); }
INLINE int vb64_any_nan(vb64 most) { return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(0x7f)) != 0; }
INLINE float vf16_sum(vf16 a) { return sum_eight(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))); }
INLINE vf16 vf16_sub(vf16 a, vf16 b) { return _mm512_sub_ps(a, b); }
INLINE vf16 vf16_max(vf16 a, vf16 b) { return _mm512_max_ps(a, b); } /* a > b ? a : b */
INLINE float vf16_most(vf16 a) { return most_of_eight(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))); }
/* 2^n for integers n in -126..127, given as n + ROUND_MAGIC. */
INLINE vf16 vf16_power(vf16 shifted) {
    const __m512i exponents = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(exponents, _mm512_set1_epi32(0x3f800000)));
}

#elif defined(VEC_AVX2)
typedef struct { __m256 a, b; } vf16;

INLINE vf16 vf16_set1(float a) { return (vf16){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
INLINE vf16 vf16_zero(void) { return vf16_set1(0.0f); }
INLINE vf16 vf16_f32(const void *p) {
    return (vf16){_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)((const char *)p + 32))};
}
INLINE vf16 vf16_f16(const void *p) { return (vf16){vf8_half(p), vf8_half((const char *)p + 16)}; }
INLINE vf16 vf16_bf16(const void *p) { return (vf16){vf8_bf16(p), vf8_bf16((const char *)p + 16)}; }
INLINE vf16 vf16_add(vf16 x, vf16 y) { return (vf16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE vf16 vf16_mul(vf16 x, vf16 y) { return (vf16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE vf16 vf16_fma(vf16 x, vf16 y, vf16 z) { return (vf16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE void vf16_store(float *p, vf16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE __m256 eight_s8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf16 vf16_s8(const void *p) { return (vf16){eight_s8(p), eight_s8((const char *)p + 8)}; }
/* E4M3 numbers times 2^-8: sign, exponent and mantissa moved into a float16. NaN codes come out as 480 * 2^-8; see vb64. */
INLINE vf16 vf16_fp8(const void *p) {
    const __m256i items = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7); /* the sign now fills two bits */
    const __m256i halves = _mm256_and_si256(items, _mm256_set1_epi16((int16_t)0xbfff));
    return (vf16){_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
/* The same of 64 codes. */
INLINE void vf16_fp8_four(const uint8_t *p, vf16 out[4]) {
    UNROLL for (int i = 0; i < 4; i++) out[i] = vf16_fp8(p + 16 * i);
}
/* The same of numbers that are neither zero nor subnormal nor NaN, which need no conversion: their bits are moved into a bfloat16, 112 is
   added to the exponent, whose upper bits are all clear, and every second number is moved up. */
typedef struct { __m256i places, bits, exponent, upper; } fp8_constants;
INLINE fp8_constants fp8_constants_of(void) {
    static const uint8_t __attribute__((aligned(32))) places[32] = {/* the first eight codes go to the lower halves of 32 bits */
        255, 0, 255, 8, 255, 1, 255, 9, 255, 2, 255, 10, 255, 3, 255, 11, 255, 4, 255, 12, 255, 5, 255, 13, 255, 6, 255, 14, 255, 7, 255, 15};
    return (fp8_constants){_mm256_load_si256((const __m256i *)places), _mm256_set1_epi16((int16_t)0x87f0), _mm256_set1_epi16(0x3800),
                           _mm256_set1_epi32((int32_t)0xffff0000)};
}
INLINE vf16 vf16_fp8_normal(const fp8_constants *c, const uint8_t *p) {
    const __m256i codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)), c->places);
    const __m256i items = _mm256_and_si256(_mm256_srai_epi16(codes, 4), c->bits); /* the sign filled five bits */
    const __m256i halves = _mm256_add_epi16(items, c->exponent);
    return (vf16){_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)), _mm256_castsi256_ps(_mm256_and_si256(halves, c->upper))};
}
/* The largest magnitude of E4M3 codes, 64 or 16 at a time: 0x7f stands for NaN. */
typedef __m256i vb64;
INLINE vb64 vb64_zero(void) { return _mm256_setzero_si256(); }
INLINE vb64 vb64_add(vb64 most, __m256i codes) { return _mm256_max_epu8(most, _mm256_and_si256(codes, _mm256_set1_epi8(0x7f))); }
INLINE vb64 vb64_most(vb64 most, const void *p) {
    return vb64_add(vb64_add(most, _mm256_loadu_si256(p)), _mm256_loadu_si256((const __m256i *)p + 1));
}
INLINE vb64 vb64_most_16(vb64 most, const void *p) { return vb64_add(most, _mm256_zextsi128_si256(_mm_loadu_si128(p))); }
INLINE int vb64_any_nan(vb64 most) { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(0x7f))) != 0; }
/* Collects whether any of 32 more codes is zero, subnormal or NaN: less 8, these magnitudes come out above all others. */
INLINE vb64 vb64_strange(vb64 most, const void *p) {
    const __m256i magnitudes = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), _mm256_set1_epi8(0x7f));
    return _mm256_max_epu8(most, _mm256_sub_epi8(magnitudes, _mm256_set1_epi8(8)));
}
INLINE int vb64_any_strange(vb64 most) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(most, _mm256_set1_epi8(0x77)), most)) != 0;
}
INLINE float vf16_sum(vf16 x) { return sum_eight(_mm256_add_ps(x.a, x.b)); }
INLINE vf16 vf16_sub(vf16 x, vf16 y) { return (vf16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE vf16 vf16_max(vf16 x, vf16 y) { return (vf16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; } /* x > y ? x : y */
INLINE float vf16_most(vf16 x) { return most_of_eight(_mm256_max_ps(x.a, x.b)); }
INLINE __m256 eight_powers(__m256 shifted) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32(0x3f800000)));
}
INLINE vf16 vf16_power(vf16 shifted) { return (vf16){eight_powers(shifted.a), eight_powers(shifted.b)}; } /* 2^n, given n + ROUND_MAGIC */

#else
typedef struct { float f[16]; } vf16;
#define EACH16(expression) do { for (int l = 0; l < 16; l++) { expression; } } while (0)

INLINE vf16 vf16_set1(float a) { vf16 r; EACH16(r.f[l] = a); return r; }
INLINE vf16 vf16_zero(void) { return vf16_set1(0.0f); }
INLINE vf16 vf16_f32(const void *p) { vf16 r; memcpy(r.f, p, sizeof r.f); return r; }
INLINE vf16 vf16_f16(const void *p) {
    uint16_t h[16];
    vf16 r;
    memcpy(h, p, sizeof h);
    EACH16(r.f[l] = half_to_float(h[l]));
    return r;
}
INLINE vf16 vf16_bf16(const void *p) {
    uint16_t h[16];
    vf16 r;
    memcpy(h, p, sizeof h);
    EACH16(r.f[l] = bf16_to_float(h[l]));
    return r;
}
INLINE vf16 vf16_add(vf16 a, vf16 b) { EACH16(a.f[l] += b.f[l]); return a; }
INLINE vf16 vf16_mul(vf16 a, vf16 b) { EACH16(a.f[l] *= b.f[l]); return a; }
INLINE vf16 vf16_fma(vf16 a, vf16 b, vf16 c) { EACH16(c.f[l] = __builtin_fmaf(a.f[l], b.f[l], c.f[l])); return c; }
INLINE void vf16_store(float *p, vf16 a) { memcpy(p, a.f, sizeof a.f); }
INLINE vf16 vf16_s8(const void *p) {
    const int8_t *items = p;
    vf16 r;
    EACH16(r.f[l] = (float)items[l]);
    return r;
}
INLINE vf16 vf16_fp8(const void *p) {
    uint8_t e[16];
    vf16 r;
    memcpy(e, p, sizeof e);
    EACH16(r.f[l] = half_to_float((uint16_t)((e[l] & 0x80) << 8 | (e[l] & 0x7f) << 7)));
    return r;
}
INLINE void vf16_fp8_four(const uint8_t *p, vf16 out[4]) {
    for (int i = 0; i < 4; i++) out[i] = vf16_fp8(p + 16 * i);
}
typedef uint8_t vb64; /* of all codes so far */
INLINE vb64 vb64_zero(void) { return 0; }
INLINE vb64 vb64_most_16(vb64 most, const uint8_t *p) {
    EACH16(most = (p[l] & 0x7f) > most ? p[l] & 0x7f : most);
    return most;
}
INLINE vb64 vb64_most(vb64 most, const uint8_t *p) {
    for (int i = 0; i < 4; i++) most = vb64_most_16(most, p + 16 * i);
    return most;
}
INLINE int vb64_any_nan(vb64 most) { return most == 0x7f; }
INLINE float vf16_sum(vf16 a) {
    vf8 r;
    EACH8(r.f[l] = a.f[l] + a.f[l + 8]);
    return sum_eight(r);
}
INLINE vf16 vf16_sub(vf16 a, vf16 b) { EACH16(a.f[l] -= b.f[l]); return a; }
INLINE vf16 vf16_max(vf16 a, vf16 b) { EACH16(a.f[l] = a.f[l] > b.f[l] ? a.f[l] : b.f[l]); return a; }
INLINE float vf16_most(vf16 a) {
    float most = a.f[0];
    for (int l = 1; l < 16; l++) most = a.f[l] > most ? a.f[l] : most;
    return most;
}
INLINE vf16 vf16_power(vf16 shifted) { EACH16(shifted.f[l] = float_of((bits_of(shifted.f[l]) << 23) + 0x3f800000)); return shifted; }
#endif

enum { F32_CODE = 0, F16_CODE = 1, BF16_CODE = 2, INT8_ROWS_CODE = 3, FP8_CODE = 4, INT8_CODE = 16, INT4_CODE = 32, MXFP4_CODE = 48,
       BF16_SCALES = 64 /* added to the above */,
       BLOCKS = 128 /* q4_k, q6_k and what block types without kernels become; activations are coded in groups of 32 */,
       AFFINE_CODE = BLOCKS | 16, AFFINE_16_CODE = BLOCKS | 16 | 64, Q4K_CODE = BLOCKS | 32, Q6K_CODE = BLOCKS | 48 }; /* Format.code */

INLINE int is_fp8(int format) { return (format & ~3) == FP8_CODE; }
INLINE int item_size(int format) { return is_fp8(format) || format == INT8_ROWS_CODE ? 1 : format == F32_CODE ? 4 : 2; }

INLINE vf16 vf16_load(int format, const void *p) {
    if (format == INT8_ROWS_CODE) return vf16_s8(p);
    return is_fp8(format) ? vf16_fp8(p) : format == F32_CODE ? vf16_f32(p) : format == F16_CODE ? vf16_f16(p) : vf16_bf16(p);
}

/* The first n < 16 items at p, then zeros. */
INLINE vf16 vf16_head(int format, const void *p, int n) {
    uint8_t items[64] = {0};
    memcpy(items, p, (size_t)n * (size_t)item_size(format));
    return vf16_load(format, items);
}

/* SPAN floats in two registers, in an order of the format's own: bf16 items are widened in place, the even ones apart from the odd
   ones, which takes half the work. `in` and `out` read and write floats that lie in their usual order. */
#if defined(VEC_AVX512)
enum { SPAN = 32 };
typedef struct { __m512 a, b; } vspan;

INLINE vspan vspan_set1(float x) { return (vspan){_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
INLINE vspan vspan_zero(void) { return vspan_set1(0.0f); }
INLINE vspan vspan_fma(vspan x, vspan y, vspan z) { return (vspan){_mm512_fmadd_ps(x.a, y.a, z.a), _mm512_fmadd_ps(x.b, y.b, z.b)}; }
INLINE vspan vspan_load(int format, const void *p) {
    if (format == BF16_CODE) {
        const __m512i items = _mm512_loadu_si512(p);
        return (vspan){_mm512_castsi512_ps(_mm512_slli_epi32(items, 16)),
                       _mm512_castsi512_ps(_mm512_and_si512(items, _mm512_set1_epi32((int32_t)0xffff0000)))};
    }
    return (vspan){vf16_load(format, p), vf16_load(format, (const uint8_t *)p + 16 * item_size(format))};
}
INLINE vspan vspan_in(int format, const float *p) {
    const __m512 x = _mm512_loadu_ps(p), y = _mm512_loadu_ps(p + 16);
    if (format != BF16_CODE) return (vspan){x, y};
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return (vspan){_mm512_permutex2var_ps(x, even, y), _mm512_permutex2var_ps(x, _mm512_or_si512(even, _mm512_set1_epi32(1)), y)};
}
INLINE void vspan_out(int format, float *p, vspan x) {
    if (format == BF16_CODE) {
        const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        x = (vspan){_mm512_permutex2var_ps(x.a, first, x.b),
                    _mm512_permutex2var_ps(x.a, _mm512_or_si512(first, _mm512_set1_epi32(8)), x.b)};
    }
    _mm512_storeu_ps(p, x.a);
    _mm512_storeu_ps(p + 16, x.b);
}

#else
enum { SPAN = 16 };
typedef vf16 vspan;

INLINE vspan vspan_set1(float x) { return vf16_set1(x); }
INLINE vspan vspan_zero(void) { return vf16_zero(); }
INLINE vspan vspan_fma(vspan x, vspan y, vspan z) { return vf16_fma(x, y, z); }
#if defined(VEC_AVX2)
INLINE vspan vspan_load(int format, const void *p) {
    if (format != BF16_CODE) return vf16_load(format, p);
    const __m256i items = _mm256_loadu_si256(p);
    return (vspan){_mm256_castsi256_ps(_mm256_slli_epi32(items, 16)),
                   _mm256_castsi256_ps(_mm256_and_si256(items, _mm256_set1_epi32((int32_t)0xffff0000)))};
}
INLINE vspan vspan_in(int format, const float *p) {
    const vf16 x = vf16_f32(p);
    if (format != BF16_CODE) return x;
    const __m256 low = _mm256_permute2f128_ps(x.a, x.b, 0x20), high = _mm256_permute2f128_ps(x.a, x.b, 0x31);
    return (vspan){_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
}
INLINE void vspan_out(int format, float *p, vspan x) {
    if (format == BF16_CODE) {
        const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
        x = (vspan){_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    }
    vf16_store(p, x);
}
#else
INLINE vspan vspan_load(int format, const void *p) { return vf16_load(format, p); }
INLINE vspan vspan_in(int format, const float *p) { (void)format; return vf16_f32(p); }
INLINE void vspan_out(int format, float *p, vspan x) { (void)format; vf16_store(p, x); }
#endif
#endif

#endif
