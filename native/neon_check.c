/* Runs matrices of every format through one instruction set's kernels and prints the bits of the results, so that builds for
   different processors can be compared (make neon). Weights, scales and inputs come from one small generator. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kern_table.h"

extern const colibri_table CHECKED_TABLE;

enum { ROWS = 19, COLUMNS = 290, TOKENS = 9, WORKSPACE = 1 << 20 };

static uint32_t state = 1;

static uint32_t draw(void) { /* xorshift32 */
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* Bytes that are finite as float16, bfloat16, float32, E4M3 and E8M0, and any int4 and int8 codes. */
static void fill(uint8_t *data, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i++) data[i] = (uint8_t)(draw() % 64 + (draw() & 128));
}

static void print_product(colibri_context *ctx, int format, int64_t stride, uint8_t *data, const float *x) {
    static float out[TOKENS * ROWS];
    const colibri_matrix m = {data, NULL, stride, format, ROWS, COLUMNS, 0};
    const int32_t code = colibri_matmul(ctx, &m, x, TOKENS, out);
    uint32_t sum = 0, bits;
    for (int i = 0; i < TOKENS * ROWS; i++) {
        memcpy(&bits, &out[i], sizeof bits);
        sum = sum * 31 + bits;
    }
    printf("format %d activations %d code %d %08x %.6g\n", format, ctx->activations, code, sum, (double)out[TOKENS]);
}

int main(void) {
    static const int formats[] = {0, 1, 2, 4, 5, 16, 17, 18, 32, 33, 34, 48};
    uint8_t *data = malloc(1 << 18), *workspace = aligned_alloc(64, WORKSPACE);
    float *x = malloc(TOKENS * COLUMNS * sizeof *x), *raised = malloc(TOKENS * COLUMNS * sizeof *x);
    colibri_context ctx = {colibri_pool_new(2), &CHECKED_TABLE, workspace, WORKSPACE, 0, 0};
    if (!data || !workspace || !x || !raised || !ctx.pool) return 1;
    for (int i = 0; i < TOKENS * COLUMNS; i++) x[i] = (float)(int32_t)draw() / 1073741824.0f;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        const int group = 32 << (formats[f] & 15), groups = (COLUMNS + group - 1) / group;
        const int item = formats[f] == 0 ? 4 : formats[f] < 4 ? 2 : 1, scales = formats[f] == 48 ? 1 : 2;
        const int64_t stride = formats[f] < 16 ? 8 * COLUMNS * item : groups * 8 * (scales + group / (formats[f] < 32 ? 1 : 2));
        fill(data, 1 << 18);
        for (ctx.activations = 0; ctx.activations < 3; ctx.activations++) print_product(&ctx, formats[f], stride, data, x);
    }
    colibri_exp(&CHECKED_TABLE, x, raised, TOKENS * COLUMNS);
    uint32_t sum = 0, bits;
    for (int i = 0; i < TOKENS * COLUMNS; i++) {
        memcpy(&bits, &raised[i], sizeof bits);
        sum = sum * 31 + bits;
    }
    printf("exp %08x\n", sum);
    colibri_pool_free(ctx.pool);
    return 0;
}
