/* Picks an instruction set's table and passes calls on to it. */
#include <stddef.h>

#include "kern_table.h"

#ifdef HAVE_ISA_AVX512VNNI
extern const colibri_table colibri_table_avx512vnni;
static int32_t runs_avx512vnni(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
#endif

#ifdef HAVE_ISA_AVXVNNI
#include <cpuid.h>
extern const colibri_table colibri_table_avxvnni;
static int32_t runs_avxvnni(void) { /* leaf 7.1: older compilers know no name for it */
    unsigned a = 0, b, c, d;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#ifdef HAVE_ISA_AVX2
extern const colibri_table colibri_table_avx2;
static int32_t runs_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* F16C is older than AVX2 */
}
#endif

#ifdef HAVE_ISA_DOTPROD
#include <sys/auxv.h>
extern const colibri_table colibri_table_dotprod;
static int32_t runs_dotprod(void) { return (getauxval(AT_HWCAP) >> 20 & 1) && (getauxval(AT_HWCAP) >> 10 & 1); } /* ASIMDDP, ASIMDHP */
#endif

extern const colibri_table colibri_table_generic;
static int32_t runs_generic(void) { return 1; }

typedef struct {
    const char *name;
    const colibri_table *table;
    int32_t (*runs)(void);
} isa_entry;

static const isa_entry ISAS[] = { /* the best first */
#ifdef HAVE_ISA_AVX512VNNI
    {"avx512vnni", &colibri_table_avx512vnni, runs_avx512vnni},
#endif
#ifdef HAVE_ISA_AVXVNNI
    {"avxvnni", &colibri_table_avxvnni, runs_avxvnni},
#endif
#ifdef HAVE_ISA_AVX2
    {"avx2", &colibri_table_avx2, runs_avx2},
#endif
#ifdef HAVE_ISA_DOTPROD
    {"dotprod", &colibri_table_dotprod, runs_dotprod},
#endif
    {"generic", &colibri_table_generic, runs_generic},
};

int32_t colibri_abi_version(void) { return COLIBRI_ABI_VERSION; }
int32_t colibri_num_isas(void) { return (int32_t)(sizeof ISAS / sizeof *ISAS); }
const char *colibri_isa_name(int32_t index) { return ISAS[index].name; }
int32_t colibri_isa_runs(int32_t index) { return ISAS[index].runs(); }
const colibri_table *colibri_isa_table(int32_t index) { return ISAS[index].table; }

const colibri_table *colibri_best_table(void) {
    int32_t best = 0;
    while (!ISAS[best].runs()) best++; /* the last one always does */
    return ISAS[best].table;
}

int64_t colibri_workspace_nbytes(const colibri_limits *limits) { return colibri_table_generic.workspace_nbytes(limits); }

int32_t colibri_embed(colibri_context *ctx, const colibri_matrix *table, const int32_t *ids, int32_t rows, float *out) {
    return ctx->table->embed(ctx, table, ids, rows, out);
}

int32_t colibri_matmul(colibri_context *ctx, const colibri_matrix *m, const float *x, int32_t rows, float *out) {
    return ctx->table->matmul(ctx, m, x, rows, out);
}

int32_t colibri_attention_step(colibri_context *ctx, const colibri_attention *layer, const float *x, const colibri_batch *batch,
                               const colibri_kv *kv, float *y) {
    return ctx->table->attention_step(ctx, layer, x, batch, kv, y);
}

int32_t colibri_attend(colibri_context *ctx, const colibri_attention *layer, const colibri_heads *heads, const colibri_batch *batch,
                       const colibri_kv *kv, float *out) {
    return ctx->table->attend(ctx, layer, heads, batch, kv, out);
}

int32_t colibri_latent_step(colibri_context *ctx, const colibri_latent *layer, const float *x, const colibri_batch *batch,
                            const colibri_latent_state *state, float *y) {
    return ctx->table->latent_step(ctx, layer, x, batch, state, y);
}

int32_t colibri_ffn_step(colibri_context *ctx, const colibri_ffn *layer, const float *x, int32_t rows, float *y) {
    return ctx->table->ffn_step(ctx, layer, x, rows, y);
}

int32_t colibri_route_step(colibri_context *ctx, const colibri_router *layer, const float *x, colibri_routing *routing) {
    return ctx->table->route_step(ctx, layer, x, routing);
}

int32_t colibri_moe_step(colibri_context *ctx, const colibri_experts *layer, const colibri_routing *routing, const int32_t *experts,
                         const int32_t *slots, int32_t num_experts, const colibri_slots *table, colibri_progress *progress, float *y) {
    return ctx->table->moe_step(ctx, layer, routing, experts, slots, num_experts, table, progress, y);
}

int32_t colibri_moe_finish(colibri_context *ctx, const colibri_experts *layer, const colibri_routing *routing, float *y, float *x) {
    return ctx->table->moe_finish(ctx, layer, routing, y, x);
}

int32_t colibri_head_step(colibri_context *ctx, const colibri_norm *norm, const colibri_matrix *lm_head, const float *x, int32_t rows,
                          float *out) {
    return ctx->table->head_step(ctx, norm, lm_head, x, rows, out);
}

void colibri_exp(const colibri_table *table, const float *x, float *out, int64_t n) { table->exp(x, out, n); }

/* By the best set that runs, whichever was chosen: the limit of reading belongs to the machine. */
uint64_t colibri_read_sum(colibri_context *ctx, const uint8_t *data, int64_t nbytes) {
    static const colibri_table *best; /* looked for once: a processor's answers are slow in virtual machines */
    const colibri_table *table = __atomic_load_n(&best, __ATOMIC_RELAXED);
    for (int32_t i = 0; !table; i++) table = ISAS[i].runs() ? ISAS[i].table : NULL;
    __atomic_store_n(&best, table, __ATOMIC_RELAXED);
    return table->read_sum(ctx, data, nbytes);
}

int32_t colibri_project(colibri_context *ctx, const colibri_norm *norm, const colibri_matrix *const *matrices, int32_t num_matrices,
                        const float *x, int32_t rows, float *const *out) {
    return ctx->table->project(ctx, norm, matrices, num_matrices, x, rows, out);
}

int32_t colibri_norm_rows(colibri_context *ctx, const colibri_group_norm *norm, const float *x, int64_t x_stride, const float *gate,
                          int64_t gate_stride, int32_t rows, int32_t width, float *out) {
    return ctx->table->norm_rows(ctx, norm, x, x_stride, gate, gate_stride, rows, width, out);
}

int32_t colibri_activate(colibri_context *ctx, int32_t kind, const float *x, int64_t x_stride, int32_t rows, int32_t width, float *out) {
    return ctx->table->activate(ctx, kind, x, x_stride, rows, width, out);
}

int32_t colibri_decay_rows(colibri_context *ctx, const colibri_decay *layer, const float *a, int64_t a_stride, int32_t rows, float *out) {
    return ctx->table->decay_rows(ctx, layer, a, a_stride, rows, out);
}

int32_t colibri_conv_rows(colibri_context *ctx, const colibri_short_conv *layer, const colibri_cell_layer *state,
                          const colibri_cell_rows *rows, float *x, int64_t x_stride) {
    return ctx->table->conv_rows(ctx, layer, state, rows, x, x_stride);
}

int32_t colibri_delta_rows(colibri_context *ctx, const colibri_delta_rule *layer, const colibri_cell_layer *state,
                           const colibri_cell_rows *rows, const float *q, int64_t q_stride, const float *k, int64_t k_stride,
                           const float *v, int64_t v_stride, const float *decay, int64_t decay_stride, const float *beta,
                           int64_t beta_stride, float *out) {
    return ctx->table->delta_rows(ctx, layer, state, rows, q, q_stride, k, k_stride, v, v_stride, decay, decay_stride, beta, beta_stride, out);
}

int32_t colibri_pool_rows(colibri_context *ctx, const colibri_pooling *layer, const colibri_cell_layer *state, const colibri_cell_rows *rows,
                          const colibri_batch *batch, const colibri_plane *plane, float *values, const float *gates) {
    return ctx->table->pool_rows(ctx, layer, state, rows, batch, plane, values, gates);
}

int32_t colibri_select_entries(colibri_context *ctx, const colibri_entry_indexer *layer, const colibri_batch *batch, const colibri_plane *plane,
                               float *q, const float *weights, int32_t *selected) {
    return ctx->table->select_entries(ctx, layer, batch, plane, q, weights, selected);
}

int32_t colibri_shared_key_rows(colibri_context *ctx, const colibri_shared_key *layer, const colibri_batch *batch,
                                const colibri_shared_key_state *state, float *q, float *k) {
    return ctx->table->shared_key_rows(ctx, layer, batch, state, q, k);
}

int32_t colibri_matmul_groups(colibri_context *ctx, const colibri_matrix *m, int32_t num_groups, const float *x, int32_t rows, float *out) {
    return ctx->table->matmul_groups(ctx, m, num_groups, x, rows, out);
}

int32_t colibri_read_streams(colibri_context *ctx, const colibri_stream_mix *mix, const float *x, int32_t rows, float *weights, float *out) {
    return ctx->table->read_streams(ctx, mix, x, rows, weights, out);
}

int32_t colibri_write_streams(colibri_context *ctx, const colibri_stream_mix *mix, const float *weights, const float *y, int32_t rows,
                              int32_t width, float *x) {
    return ctx->table->write_streams(ctx, mix, weights, y, rows, width, x);
}

int32_t colibri_read_gated(colibri_context *ctx, const float *x, const float *gate, int32_t num_streams, int32_t width, int32_t rows, float *out) {
    return ctx->table->read_gated(ctx, x, gate, num_streams, width, rows, out);
}

int32_t colibri_write_gated(colibri_context *ctx, const float *weights, const float *y, int32_t num_streams, int32_t width, int32_t rows, float *x) {
    return ctx->table->write_gated(ctx, weights, y, num_streams, width, rows, x);
}

int32_t colibri_match_streams(colibri_context *ctx, const float *x, const float *y, int32_t num_streams, int32_t width, int32_t rows, float *out) {
    return ctx->table->match_streams(ctx, x, y, num_streams, width, rows, out);
}
