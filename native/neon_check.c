/* Runs matrices of every format and latent attention through one instruction set's kernels and prints the bits of the results, so that builds for
   different processors can be compared (make neon). Weights, scales and inputs come from one small generator. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kern_table.h"

extern const colibri_table CHECKED_TABLE;

enum { ROWS = 19, COLUMNS = 290, TOKENS = 9, WORKSPACE = 1 << 24 };

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

static float draw_float(void) { return (float)(int32_t)draw() / 1073741824.0f; }

static float *draw_floats(int64_t n, float scale) {
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; x && i < n; i++) x[i] = draw_float() * scale;
    return x;
}

static uint32_t sum_of(const float *x, int64_t n) {
    uint32_t sum = 0, bits;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&bits, &x[i], sizeof bits);
        sum = sum * 31 + bits;
    }
    return sum;
}

static void print_product(colibri_context *ctx, int format, int64_t stride, uint8_t *data, const float *x) {
    static float out[TOKENS * ROWS];
    const colibri_matrix m = {data, NULL, stride, format, ROWS, COLUMNS, 0};
    const int32_t code = colibri_matmul(ctx, &m, x, TOKENS, out);
    printf("format %d activations %d code %d %08x %.6g\n", format, ctx->activations, code, sum_of(out, TOKENS * ROWS), (double)out[TOKENS]);
}

static colibri_matrix drawn_matrix(int rows, int columns) {
    const float *data = draw_floats((int64_t)rows * columns, 0.2f);
    return (colibri_matrix){(const uint8_t *)data, NULL, 8 * columns * (int64_t)sizeof *data, 0, rows, columns, 0};
}

static colibri_norm drawn_norm(int width) { return (colibri_norm){draw_floats(width, 1.0f), 1e-6f, width}; }

/* A prompt, then a few tokens, through a layer whose indexer selects 20 keys; the pool is bf16, float16 or int8. */
static void print_latent(colibri_context *ctx, int format) {
    enum { HIDDEN = 48, HEADS = 3, NOPE = 16, ROPE = 8, VALUE = 12, RANK = 24, LOW = 20, CHOOSING = 2, WIDTH = 16, PROMPT = 67, MORE = 3, TOP = 20 };
    static uint8_t pool[1 << 16];
    static int32_t positions[PROMPT + MORE], members[PROMPT + MORE], blocks[] = {1, 0}, selected[(PROMPT + MORE) * TOP];
    const int64_t item = format == 3 ? 1 : 2, scale = format == 3 ? 4 : 0, plane[] = {RANK * item + scale, ROPE * item + scale, WIDTH * item + scale};
    const int64_t block = 64 * (plane[0] + plane[1] + plane[2]);
    const colibri_latent layer = {
        .norm = drawn_norm(HIDDEN), .q_norm = drawn_norm(LOW), .kv_norm = drawn_norm(RANK),
        .q_a_proj = drawn_matrix(LOW, HIDDEN), .q_b_proj = drawn_matrix(HEADS * (NOPE + ROPE), LOW),
        .kv_a_proj = drawn_matrix(RANK + ROPE, HIDDEN), .kv_b_proj = drawn_matrix(HEADS * (NOPE + VALUE), RANK), .o_proj = drawn_matrix(HIDDEN, HEADS * VALUE),
        .indexer = {.k_norm = drawn_norm(WIDTH), .k_norm_bias = draw_floats(WIDTH, 0.1f), .q_proj = drawn_matrix(CHOOSING * WIDTH, LOW),
                    .k_proj = drawn_matrix(WIDTH, HIDDEN), .weights_proj = drawn_matrix(CHOOSING, HIDDEN), .num_heads = CHOOSING,
                    .head_dim = WIDTH, .rotary_dim = ROPE, .scale = 0.25f, .weight_scale = 0.7f},
        .num_heads = HEADS, .nope_dim = NOPE, .rope_dim = ROPE, .value_dim = VALUE, .rotary_dim = ROPE, .top_k = TOP, .scale = 0.2f, .pool = 1,
    };
    const colibri_latent_state kept = {
        .latent = {pool, sizeof pool, block, 0, format, RANK, 1, 0},
        .rope_key = {pool, sizeof pool, block, 64 * plane[0], format, ROPE, 1, 0},
        .index_key = {pool, sizeof pool, block, 64 * (plane[0] + plane[1]), format, WIDTH, 1, 0},
        .selected = selected,
    };
    float *x = draw_floats((PROMPT + MORE) * HIDDEN, 1.0f), *turns = draw_floats((PROMPT + MORE) * ROPE, 0.5f);
    for (int t = 0; t < PROMPT + MORE; t++) positions[t] = t;
    int32_t code = 0;
    for (int first = 0, rows = PROMPT; first < PROMPT + MORE; first += rows, rows = MORE) {
        const colibri_batch batch = {rows, HIDDEN, 1, 2, positions + first, members, blocks, turns + first * ROPE / 2, turns + first * ROPE};
        code |= colibri_latent_step(ctx, &layer, x + first * HIDDEN, &batch, &kept, x + first * HIDDEN);
    }
    printf("latent format %d activations %d code %d %08x %.6g\n", format, ctx->activations, code, sum_of(x, (PROMPT + MORE) * HIDDEN), (double)x[PROMPT * HIDDEN]);
}

int main(void) {
    static const int formats[] = {0, 1, 2, 4, 5, 16, 17, 18, 32, 33, 34, 48};
    uint8_t *data = malloc(1 << 18), *workspace = aligned_alloc(64, WORKSPACE);
    float *x = malloc(TOKENS * COLUMNS * sizeof *x), *raised = malloc(TOKENS * COLUMNS * sizeof *x);
    colibri_context ctx = {colibri_pool_new(2), &CHECKED_TABLE, workspace, WORKSPACE, 0, 0};
    if (!data || !workspace || !x || !raised || !ctx.pool) return 1;
    for (int i = 0; i < TOKENS * COLUMNS; i++) x[i] = draw_float();
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        const int group = 32 << (formats[f] & 15), groups = (COLUMNS + group - 1) / group;
        const int item = formats[f] == 0 ? 4 : formats[f] < 4 ? 2 : 1, scales = formats[f] == 48 ? 1 : 2;
        const int64_t stride = formats[f] < 16 ? 8 * COLUMNS * item : groups * 8 * (scales + group / (formats[f] < 32 ? 1 : 2));
        fill(data, 1 << 18);
        for (ctx.activations = 0; ctx.activations < 3; ctx.activations++) print_product(&ctx, formats[f], stride, data, x);
    }
    colibri_exp(&CHECKED_TABLE, x, raised, TOKENS * COLUMNS);
    printf("exp %08x\n", sum_of(raised, TOKENS * COLUMNS));
    ctx.activations = 1;
    for (int format = 1; format < 4; format++) print_latent(&ctx, format);
    colibri_pool_free(ctx.pool);
    return 0;
}
