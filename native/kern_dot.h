/* Integer dot products of panels: sums of eight rows (vi8), or of the sixteen rows of two panels (vi16, AVX-512 only).
   A byte dot product adds into `part`, which vi8_flush turns into 32-bit sums; where there is no instruction for four
   bytes at once, part holds 16-bit sums and takes MOST_BYTE_SUMS additions of int4 or mxfp4 products at most. */
#ifndef COLIBRI_KERN_DOT_H
#define COLIBRI_KERN_DOT_H

#include "kern_vec.h"

enum { MOST_BYTE_SUMS = 8 };

INLINE int32_t word_at(const void *p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* Twice the values of E2M1 codes, plus 12 so that none is negative. */
enum { MXFP4_OFFSET = 12 };
#define MXFP4_DOUBLED 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAVE_VNNI 1
#define DPBUSD8 _mm256_dpbusd_epi32
#define DPWSSD8 _mm256_dpwssd_epi32
#elif defined(__AVXVNNI__)
#define HAVE_VNNI 1
#define DPBUSD8 _mm256_dpbusd_avx_epi32
#define DPWSSD8 _mm256_dpwssd_avx_epi32
#else
#define HAVE_VNNI 0
#endif

/* Additions of integers may be reordered, and compilers do, until products lie in memory that were to be added at once. */
#if defined(VEC_AVX2) && !HAVE_VNNI
#define KEEP_SUM KEEP
#else
#define KEEP_SUM(x) (void)(x)
#endif

#if defined(VEC_AVX2)

INLINE vi8 vi8_shr16(vi8 a, int n) { return _mm256_srli_epi16(a, n); } /* of 16 bits, zeros in */
INLINE vi8 vi8_mxfp4(vi8 nibbles) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(MXFP4_DOUBLED)), nibbles); }

#if HAVE_VNNI
enum { INT8_OFFSET = 128 };
/* acc + both signed 16-bit halves of each lane times the pair of codes at p. */
INLINE vi8 vi8_pairs(vi8 acc, vi8 a, const void *p) { return DPWSSD8(acc, a, _mm256_set1_epi32(word_at(p))); }
/* part + the four bytes of each lane, 0 to 24, times the four codes at p. */
INLINE vi8 vi8_bytes(vi8 part, vi8 a, const void *p) { return DPBUSD8(part, a, _mm256_set1_epi32(word_at(p))); }
INLINE vi8 vi8_flush(vi8 part) { return part; }
/* acc + (the four signed bytes of each lane + INT8_OFFSET) times the four codes at p. */
INLINE vi8 vi8_signed_bytes(vi8 acc, vi8 a, const void *p) { return vi8_bytes(acc, _mm256_xor_si256(a, _mm256_set1_epi8(-128)), p); }
#else
enum { INT8_OFFSET = 0 };
INLINE vi8 vi8_pairs(vi8 acc, vi8 a, const void *p) { return vi8_add(acc, _mm256_madd_epi16(a, _mm256_set1_epi32(word_at(p)))); }
INLINE vi8 vi8_bytes(vi8 part, vi8 a, const void *p) {
    return _mm256_add_epi16(part, _mm256_maddubs_epi16(a, _mm256_set1_epi32(word_at(p))));
}
INLINE vi8 vi8_flush(vi8 part) { return _mm256_madd_epi16(part, _mm256_set1_epi16(1)); }
INLINE vi8 vi8_signed_bytes(vi8 acc, vi8 a, const void *p) { /* |a| <= 128, |q| <= 127: two products fit 16 bits */
    const vi8 q = _mm256_sign_epi8(_mm256_set1_epi32(word_at(p)), a);
    return vi8_add(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(a), q), _mm256_set1_epi16(1)));
}
#endif

/* Eight powers of two from biased exponents: 0 is 2^-127, 255 NaN. */
INLINE vf8 vf8_ue8m0(const void *p) {
    const vi8 e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    const vi8 power = _mm256_max_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x00400000));
    const vi8 nan = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(_mm256_or_si256(power, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000))));
}

#else

enum { INT8_OFFSET = 0 };

INLINE vi8 vi8_shr16(vi8 a, int n) {
    EACH8(a.i[l] = (int32_t)(((uint32_t)a.i[l] >> n & (0xffffu >> n)) | ((uint32_t)a.i[l] >> 16 >> n << 16)));
    return a;
}
INLINE vi8 vi8_mxfp4(vi8 nibbles) {
    static const uint8_t doubled[16] = {MXFP4_DOUBLED};
    uint8_t bytes[32];
    memcpy(bytes, nibbles.i, sizeof bytes);
    for (int b = 0; b < 32; b++) bytes[b] = doubled[bytes[b]];
    return vi8_load(bytes);
}
INLINE vi8 vi8_pairs(vi8 acc, vi8 a, const void *p) {
    int16_t q[2];
    memcpy(q, p, sizeof q);
    EACH8(acc.i[l] += (int16_t)a.i[l] * q[0] + (a.i[l] >> 16) * q[1]);
    return acc;
}
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
INLINE vi8 vi8_signed_bytes(vi8 acc, vi8 a, const void *p) {
    const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(word_at(p)));
    vst1q_s32(acc.i, vdotq_s32(vld1q_s32(acc.i), vreinterpretq_s8_s32(vld1q_s32(a.i)), q));
    vst1q_s32(acc.i + 4, vdotq_s32(vld1q_s32(acc.i + 4), vreinterpretq_s8_s32(vld1q_s32(a.i + 4)), q));
    return acc;
}
#else
INLINE vi8 vi8_signed_bytes(vi8 acc, vi8 a, const void *p) {
    int8_t q[4];
    memcpy(q, p, sizeof q);
    EACH8(acc.i[l] += (int8_t)a.i[l] * q[0] + (int8_t)(a.i[l] >> 8) * q[1] + (int8_t)(a.i[l] >> 16) * q[2] + (a.i[l] >> 24) * q[3]);
    return acc;
}
#endif
INLINE vi8 vi8_bytes(vi8 part, vi8 a, const void *p) { return vi8_signed_bytes(part, a, p); } /* below 128 there is no difference */
INLINE vi8 vi8_flush(vi8 part) { return part; }

INLINE vf8 vf8_ue8m0(const void *p) {
    const uint8_t *e = p;
    vf8 r;
    EACH8(r.f[l] = ue8m0_to_float(e[l]));
    return r;
}

#endif

INLINE vi8 vi8_panels(const uint8_t *const *panels, int64_t at) { return vi8_load(panels[0] + at); }
INLINE vf8 vf8_half_panels(const uint8_t *const *panels, int64_t at) { return vf8_half(panels[0] + at); }
INLINE vf8 vf8_bf16_panels(const uint8_t *const *panels, int64_t at) { return vf8_bf16(panels[0] + at); }
INLINE vf8 vf8_ue8m0_panels(const uint8_t *const *panels, int64_t at) { return vf8_ue8m0(panels[0] + at); }
INLINE void vf8_store_panels(float (*const *out)[8], int n, vf8 a) { vf8_store(out[0][n], a); }

#if defined(VEC_AVX512) && HAVE_VNNI
#define HAVE_WIDE 1
typedef __m512i vi16;

INLINE vi16 vi16_set1(int32_t a) { return _mm512_set1_epi32(a); }
INLINE vi16 vi16_add(vi16 a, vi16 b) { return _mm512_add_epi32(a, b); }
INLINE vi16 vi16_and(vi16 a, vi16 b) { return _mm512_and_si512(a, b); }
INLINE vi16 vi16_shr16(vi16 a, int n) { return _mm512_srli_epi16(a, (unsigned)n); }
INLINE vi16 vi16_shl(vi16 a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
INLINE vi16 vi16_sar(vi16 a, int n) { return _mm512_srai_epi32(a, (unsigned)n); }
INLINE vi16 vi16_low_bytes(vi16 a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
INLINE vi16 vi16_high_bytes(vi16 a) { return _mm512_srai_epi16(a, 8); }
INLINE vf16 vi16_float(vi16 a) { return _mm512_cvtepi32_ps(a); }
INLINE vi16 vi16_mxfp4(vi16 nibbles) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(MXFP4_DOUBLED)), nibbles); }
INLINE vi16 vi16_pairs(vi16 acc, vi16 a, const void *p) { return _mm512_dpwssd_epi32(acc, a, _mm512_set1_epi32(word_at(p))); }
INLINE vi16 vi16_bytes(vi16 part, vi16 a, const void *p) { return _mm512_dpbusd_epi32(part, a, _mm512_set1_epi32(word_at(p))); }
INLINE vi16 vi16_flush(vi16 part) { return part; }
INLINE vi16 vi16_signed_bytes(vi16 acc, vi16 a, const void *p) { return vi16_bytes(acc, _mm512_xor_si512(a, _mm512_set1_epi8(-128)), p); }
INLINE vi16 vi16_panels(const uint8_t *const *panels, int64_t at) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(vi8_load(panels[0] + at)), vi8_load(panels[1] + at), 1);
}
INLINE vf16 vf16_two(vf8 a, vf8 b) { return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1); }
INLINE vf16 vf16_half_panels(const uint8_t *const *panels, int64_t at) {
    return vf16_two(vf8_half(panels[0] + at), vf8_half(panels[1] + at));
}
INLINE vf16 vf16_bf16_panels(const uint8_t *const *panels, int64_t at) {
    return vf16_two(vf8_bf16(panels[0] + at), vf8_bf16(panels[1] + at));
}
INLINE vf16 vf16_ue8m0_panels(const uint8_t *const *panels, int64_t at) { /* see vf8_ue8m0 */
    const __m128i both = _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(panels[0] + at))), (const __m64 *)(panels[1] + at)));
    const __m512i e = _mm512_cvtepu8_epi32(both), power = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(power, nan, _mm512_set1_epi32(0x7fc00000)));
}
INLINE void vf16_store_panels(float (*const *out)[8], int n, vf16 a) {
    vf8_store(out[0][n], _mm512_castps512_ps256(a));
    vf8_store(out[1][n], _mm512_extractf32x8_ps(a, 1));
}
#else
#define HAVE_WIDE 0
#endif

#endif
