/* The library's own scalar mathematics: one source, so every instruction set gives the same bits. */
#ifndef COLIBRI_KERN_MATH_H
#define COLIBRI_KERN_MATH_H

#include <stdint.h>
#include <string.h>

#define BRANCHLESS static inline __attribute__((always_inline))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "weights are little-endian");

BRANCHLESS uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

BRANCHLESS float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static const float ROUND_MAGIC = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, to nearest even */

/* e^x within 1 ulp, subnormal results included; 0 at -inf, inf at inf, NaN at NaN.
   x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7 (the rest is below 0.1 ulp); then 2^n in two steps. */
BRANCHLESS float exp_f32(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const float shifted = __builtin_fmaf(x, 0x1.715476p+0f, ROUND_MAGIC);
    const float n = shifted - ROUND_MAGIC;
    const int32_t i = (int32_t)(bits_of(shifted) - bits_of(ROUND_MAGIC));
    float r = __builtin_fmaf(n, -0x1.62e400p-1f, x); /* ln 2 in two parts, the first short enough for n to be exact */
    r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.a01a02p-13f;
    p = __builtin_fmaf(p, r, 0x1.6c16c2p-10f);
    p = __builtin_fmaf(p, r, 0x1.111112p-7f);
    p = __builtin_fmaf(p, r, 0x1.555556p-5f);
    p = __builtin_fmaf(p, r, 0x1.555556p-3f);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p * r, r, r) + 1.0f;
    const int32_t half = i >> 1;
    const float low = float_of((uint32_t)(half + 127) << 23);
    const float high = float_of((uint32_t)(i - half + 127) << 23);
    return p * low * high;
}

static const float LOG2_E = 0x1.715476p+0f;

/* 2^r for |r| <= 1/2: the polynomial of degree 6 through (0, 1) whose largest relative error, 2.6e-9, is the least. */
static const float EXP2_TERMS[7] = {0x1.470b4ap-13f, 0x1.5f7276p-10f, 0x1.3b270ep-7f, 0x1.c6ae72p-5f, 0x1.ebfbe2p-3f, 0x1.62e432p-1f, 1.0f};

/* 2^x for x <= 0, within 1 ulp; what is below -125 counts as that, NaN at NaN. x = n + r with |r| <= 1/2. */
BRANCHLESS float exp2_falling(float x) {
    x = x < -125.0f ? -125.0f : x;
    const float shifted = x + ROUND_MAGIC;
    const float r = x - (shifted - ROUND_MAGIC);
    float p = EXP2_TERMS[0];
    for (int i = 1; i < 7; i++) p = __builtin_fmaf(p, r, EXP2_TERMS[i]);
    return p * float_of((bits_of(shifted) << 23) + 0x3f800000);
}

BRANCHLESS float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

BRANCHLESS float silu(float x) { return x / (1.0f + exp_f32(-x)); }

/* ln(1 + y) for 0 <= y <= 1 within 2 ulp: 2 artanh(s), s = y / (2 + y) <= 1/3, by its Taylor series to s^15. */
BRANCHLESS float log1p_of_unit(float y) {
    const float s = y / (2.0f + y), z = s * s;
    float p = 0x1.111112p-4f;
    p = __builtin_fmaf(p, z, 0x1.3b13b2p-4f);
    p = __builtin_fmaf(p, z, 0x1.745d18p-4f);
    p = __builtin_fmaf(p, z, 0x1.c71c72p-4f);
    p = __builtin_fmaf(p, z, 0x1.24924ap-3f);
    p = __builtin_fmaf(p, z, 0x1.99999ap-3f);
    p = __builtin_fmaf(p, z, 0x1.555556p-2f);
    const float twice = s + s;
    return __builtin_fmaf(twice, p * z, twice);
}

/* ln(1 + e^x), without overflow; NaN at NaN. */
BRANCHLESS float softplus(float x) {
    const float size = x < 0.0f ? -x : x;
    return (x < 0.0f ? 0.0f : x) + log1p_of_unit(exp_f32(-size));
}

BRANCHLESS float bf16_to_float(uint16_t h) { return float_of((uint32_t)h << 16); }

/* To nearest even; a NaN stays a NaN. */
BRANCHLESS uint16_t float_to_bf16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* A biased exponent: 0 is 2^-127, 255 a NaN. */
BRANCHLESS float ue8m0_to_float(uint8_t e) { return float_of(e == 0 ? 0x00400000 : e == 255 ? 0x7fc00000 : (uint32_t)e << 23); }

BRANCHLESS float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
    if (exponent == 0) return float_of(bits_of((float)mantissa * 0x1p-24f) | sign);
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* To nearest even, subnormals included; too large becomes infinite, a NaN stays a NaN. */
BRANCHLESS uint16_t float_to_half(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13);
}

#endif
