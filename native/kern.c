/* The kernels, compiled once for each instruction set with -DISA=name. Only kern_vec.h knows which one it is. */
#include "kern_attention.h"
#include "kern_dense.h"
#include "kern_moe.h"
#include "kern_table.h"

/* The most that any step within the limits takes: the steps' own bookkeeping, run without memory. */
static int64_t workspace_nbytes(const colibri_limits *l) {
    const int all = 7; /* codes for every group size */
    const int64_t T = l->rows, D = l->hidden_size, W = l->attention_width, F = l->intermediate_size, E = l->num_experts;
    const int64_t widest = D > F ? (D > W ? D : W) : (F > W ? F : W);
    bump b[5] = {{0}};
    take_attention(&b[0], T, D, W, 32, 1.0f, all, all); /* W holds q, k and v; 32 makes up for rounding three times */
    take_ffn(&b[1], NULL, T, D, F, 1.0f, all, all);
    take_floats(&b[1], T);
    take_input(&b[1], NULL, T, D, 1.0f, all);
    take_route(&b[2], NULL, T, D, E, 1.0f, all);
    take_moe(&b[3], NULL, T, l->num_experts_per_tok, E, E, D, F, 1.0f, all, all);
    take_floats(&b[4], T * D);
    take_input(&b[4], NULL, T, widest, 1.0f, all);
    int64_t most = 0;
    for (int i = 0; i < 5; i++) most = b[i].used > most ? b[i].used : most;
    return most;
}

static void exp_all(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = exp_f32(x[i]);
}

extern const colibri_table TABLE_NAME(ISA);
const colibri_table TABLE_NAME(ISA) = {
    .workspace_nbytes = workspace_nbytes,
    .embed = embed,
    .matmul = matmul,
    .attention_step = attention_step,
    .ffn_step = ffn_step,
    .route_step = route_step,
    .moe_step = moe_step,
    .moe_finish = moe_finish,
    .head_step = head_step,
    .exp = exp_all,
};
