/* CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), by the processor's instruction where it has one. */
#include "colibri.h"

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

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const uint8_t *data, int64_t nbytes) {
    uint64_t wide = crc;
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; nbytes > 0; nbytes--)
        crc = __builtin_ia32_crc32qi(crc, *data++);
    return crc;
}

static int has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
__attribute__((target("+crc"))) static uint32_t by_instruction(uint32_t crc, const uint8_t *data, int64_t nbytes) {
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        crc = __crc32cd(crc, word);
    }
    for (; nbytes > 0; nbytes--)
        crc = __crc32cb(crc, *data++);
    return crc;
}

static int has_instruction(void) { return (getauxval(AT_HWCAP) >> 7) & 1; } /* HWCAP_CRC32 */
#else
#define by_instruction by_table
static int has_instruction(void) { return 0; }
#endif

uint32_t colibri_crc32c(uint32_t crc, const uint8_t *data, int64_t nbytes) {
    return ~(has_instruction() ? by_instruction : by_table)(~crc, data, nbytes);
}
