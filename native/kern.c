/* The kernels, compiled once for each instruction set with -DISA=name. Only kern_vec.h knows which one it is. */
#include "kern_attention.h"
#include "kern_dense.h"
#include "kern_encode.h"
#include "kern_gated.h"
#include "kern_latent.h"
#include "kern_moe.h"
#include "kern_recurrent.h"
#include "kern_route.h"
#include "kern_shared_key.h"
#include "kern_streams.h"
#include "kern_table.h"

/* The most that any step within the limits takes: the steps' own bookkeeping, run without memory. */
static int64_t workspace_nbytes(const colibri_limits *l) {
    const int all = ALL_GROUPS; /* codes for every group size */
    const int64_t T = l->rows, D = l->hidden_size, W = l->attention_width, F = l->intermediate_size, E = l->num_experts;
    const int64_t widest = D > F ? (D > W ? D : W) : (F > W ? F : W);
    bump b[6] = {{0}};
    take_attention(&b[0], T, D, W, 32, 0, 1.0f, all, all); /* W holds q, k, v and gates; 32 makes up for rounding three times */
    take_ffn(&b[1], NULL, T, D, F, 1.0f, all, all);
    take_floats(&b[1], T);
    take_input(&b[1], NULL, T, D, 1.0f, all);
    take_route(&b[2], NULL, T, D, E, 1.0f, all);
    take_moe(&b[3], NULL, T, l->num_experts_per_tok, E, E, D, F, 1.0f, all, all);
    take_floats(&b[4], T * D);
    take_input(&b[4], NULL, T, widest, 1.0f, all);
    const colibri_latent_limits *m = &l->latent;
    const latent_sizes latent = {D, m->heads, m->q_rank, m->head_dim, m->head_dim, m->rank, m->key, m->index_heads, m->index_dim, m->index_positions};
    if (latent.heads > 0) take_latent(&b[5], T, &latent, 1.0f, all, all, all);
    int64_t most = 0;
    for (int i = 0; i < 6; i++) most = b[i].used > most ? b[i].used : most;
    return most;
}

static void exp_all(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = exp_f32(x[i]);
}

typedef uint64_t eight_words __attribute__((vector_size(64)));        /* a line */
typedef eight_words words __attribute__((may_alias, aligned(1))); /* wherever it begins */
enum { READ_STREAMS = 8, STREAM_LINES = 128, READ_LINES = READ_STREAMS * STREAM_LINES /* 64 KiB at a time */ };

typedef struct {
    const words *lines;
    words sums; /* modulo 2^64, in eight parts */
} read_job;

/* Sums lines [begin, end): eight runs of 8 KiB abreast, because one core keeps more lines on the way in several pages than
   in one. */
static void sum_lines(void *arg, int64_t begin, int64_t end) {
    read_job *job = arg;
    words sums[4] = {{0}};
    const words *w = job->lines;
    for (; begin + READ_LINES <= end; begin += READ_LINES) {
        for (int64_t i = begin; i < begin + STREAM_LINES; i++) {
            for (int s = 0; s < READ_STREAMS; s++) sums[s % 4] += w[i + s * STREAM_LINES];
        }
    }
    for (; begin < end; begin++) sums[0] += w[begin];
    sums[0] += sums[1] + sums[2] + sums[3];
    for (int i = 0; i < 8; i++) __atomic_fetch_add((uint64_t *)&job->sums + i, sums[0][i], __ATOMIC_RELAXED);
}

static uint64_t read_sum(colibri_context *ctx, const uint8_t *data, int64_t nbytes) {
    read_job job = {(const words *)(const void *)data, {0}};
    uint64_t sum = 0, word;
    pool_run(ctx->pool, sum_lines, &job, nbytes / 64, READ_LINES);
    for (int i = 0; i < 8; i++) sum += job.sums[i];
    for (int64_t at = nbytes / 64 * 64; at + 8 <= nbytes; at += 8) {
        memcpy(&word, data + at, sizeof word);
        sum += word;
    }
    return sum;
}

extern const colibri_table TABLE_NAME(ISA);
const colibri_table TABLE_NAME(ISA) = {
    .workspace_nbytes = workspace_nbytes,
    .embed = embed,
    .matmul = matmul,
    .attention_step = attention_step,
    .attend = attend_heads,
    .latent_step = latent_step,
    .ffn_step = ffn_step,
    .route_step = route_step,
    .moe_step = moe_step,
    .moe_finish = moe_finish,
    .head_step = head_step,
    .exp = exp_all,
    .read_sum = read_sum,
    .project = project,
    .norm_rows = norm_rows,
    .activate = activate,
    .decay_rows = decay_rows,
    .conv_rows = conv_rows,
    .delta_rows = delta_rows,
    .read_gated = read_gated,
    .write_gated = write_gated,
    .match_streams = match_streams,
    .pool_rows = pool_rows,
    .select_entries = select_entries,
    .shared_key_rows = shared_key_rows,
    .matmul_groups = matmul_groups,
    .read_streams = read_streams,
    .write_streams = write_streams,
    .encode = encode,
};
