/* CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), by the processor's instruction where it has one. */
#include "reader.h"

#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82F63B78u

/* Eight bytes a step. The tables are made on the stack at each call: 2048 steps, against records of megabytes. */
static uint32_t by_table(uint32_t crc, const uint8_t *data, int64_t nbytes) {
    uint32_t table[8][256];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0);
        table[0][i] = value;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint32_t low = crc ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
                              (uint32_t)data[3] << 24);
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    }
    for (; nbytes > 0; nbytes--)
        crc = (crc >> 8) ^ table[0][(crc ^ *data++) & 255];
    return crc;
}

/* The product of two polynomials over GF(2), modulo the generator; the highest bit is the coefficient of 1. */
static uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = (b >> 1) ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

#if defined(__x86_64__)
#define HAVE_INSTRUCTION __attribute__((target("sse4.2")))
#define CRC_WORD(crc, word) ((uint32_t)__builtin_ia32_crc32di(crc, word))
#define CRC_BYTE(crc, byte) __builtin_ia32_crc32qi(crc, byte)
static int has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
#define HAVE_INSTRUCTION __attribute__((target("+crc")))
#define CRC_WORD(crc, word) __crc32cd(crc, word)
#define CRC_BYTE(crc, byte) __crc32cb(crc, byte)
static int has_instruction(void) { return (getauxval(AT_HWCAP) >> 7) & 1; } /* HWCAP_CRC32 */
#endif

#ifdef HAVE_INSTRUCTION
#define RUN_BITS 14
#define RUN (1 << RUN_BITS) /* bytes of one of three runs that are summed at the same time */

/* x^(8 RUN): what a checksum is multiplied by when RUN bytes follow. */
static uint32_t run_factor(void) {
    uint32_t power = 1u << 30;
    for (int i = 0; i < RUN_BITS + 3; i++)
        power = times(power, power);
    return power;
}

static inline uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

/* The instruction takes three cycles, but one can begin in each: so three runs go side by side. */
HAVE_INSTRUCTION static uint32_t by_instruction(uint32_t crc, const uint8_t *data, int64_t nbytes) {
    uint32_t factor = nbytes >= 3 * RUN ? run_factor() : 0;
    for (; nbytes >= 3 * RUN; nbytes -= 3 * RUN, data += 3 * RUN) {
        uint32_t second = 0, third = 0;
        for (int64_t i = 0; i < RUN; i += 8) {
            crc = CRC_WORD(crc, word_at(data + i));
            second = CRC_WORD(second, word_at(data + RUN + i));
            third = CRC_WORD(third, word_at(data + 2 * RUN + i));
        }
        crc = times(factor, times(factor, crc) ^ second) ^ third;
    }
    for (; nbytes >= 8; nbytes -= 8, data += 8)
        crc = CRC_WORD(crc, word_at(data));
    for (; nbytes > 0; nbytes--)
        crc = CRC_BYTE(crc, *data++);
    return crc;
}
#else
#define by_instruction by_table
static int has_instruction(void) { return 0; }
#endif

uint32_t colibri_crc32c(uint32_t crc, const uint8_t *data, int64_t nbytes) {
    return ~(has_instruction() ? by_instruction : by_table)(~crc, data, nbytes);
}

uint32_t crc32c_shift(uint32_t remainder, int64_t nbytes) {
    for (uint32_t power = 1u << 23 /* x^8 */; nbytes; nbytes >>= 1, power = times(power, power))
        if (nbytes & 1)
            remainder = times(power, remainder);
    return remainder;
}
