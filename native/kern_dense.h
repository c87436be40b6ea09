/* embed, matmul, the gated feed-forward network, and the head. */
#ifndef COLIBRI_KERN_DENSE_H
#define COLIBRI_KERN_DENSE_H

#include "kern_linear.h"

static void embed_row(const colibri_matrix *m, int64_t row, float *out) {
    const int64_t K = m->columns;
    const uint8_t *panel = m->data + row / PANEL * m->panel_stride;
    if (is_fp8(m->format)) {
        fp8_widen(m->data, m->rows, K, fp8_block(m->format), row, out);
        return;
    }
    if (!is_coded(m->format)) {
        widen(m->format, panel + row % PANEL * K * item_size(m->format), K, out);
        return;
    }
    if (is_blocks(m->format)) {
        blocks_row(m->format, panel, row % PANEL, K, out);
        return;
    }
    const int kind = coded_kind(m->format);
    const int64_t group = coded_group(m->format), groups = (K + group - 1) / group;
    for (int64_t k = 0; k < K; k++) {
        float codes[8], scales[8];
        vf8_store(codes, column_codes(kind, panel + groups * PANEL * scale_nbytes(kind), k));
        vf8_store(scales, group_scales(m->format, panel, k / group));
        out[k] = codes[row % PANEL] * scales[row % PANEL];
    }
}

static int32_t embed(colibri_context *ctx, const colibri_matrix *table, const int32_t *ids, int32_t rows, float *out) {
    for (int32_t t = 0; t < rows; t++) {
        if (ids[t] < 0 || ids[t] >= table->rows) {
            ctx->where = t;
            return COLIBRI_ARGUMENT;
        }
        embed_row(table, ids[t], out + (int64_t)t * table->columns);
    }
    return COLIBRI_OK;
}

static int32_t matmul(colibri_context *ctx, const colibri_matrix *m, const float *x, int32_t rows, float *out) {
    bump b = bump_of(ctx);
    const input in = take_input(&b, x, rows, m->columns, top_code(ctx), groups_needed(ctx, &m, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    code_input(ctx, &in, rows);
    linear_one(ctx, m, &in, rows, out, STORE);
    return COLIBRI_OK;
}

/* down(act(gate x) * up x) of one expert or layer, for the tokens in `tokens` (NULL: all), kept from row `row` on. */
typedef struct {
    colibri_matrix gate, up, down;
    colibri_swiglu act;
    const int32_t *tokens;
    int64_t num_tokens, row;
} glu;

/* Networks of one shape over one input. Two loops with a barrier between: hidden units, then outputs. */
typedef struct {
    const glu *nets;
    int64_t num_nets, parts; /* chunks that one network is divided into */
    const input *in;         /* of gate and up */
    const input *hidden;     /* of down: [rows, F] and its codes */
    float *units;            /* hidden->x, writable */
    float *out;              /* [rows, D] */
    int64_t unit_chunk;      /* hidden units in a part: whole groups, so that a part codes its own */
    int64_t panel_chunk;
} glu_job;

/* h = g sigmoid(alpha g) (u + offset), where g is at most `limit` and u within +-limit; NaN stays. */
static void swiglu(const colibri_swiglu *act, const float *gate, const float *up, float *h) {
    const float limit = act->limit;
    for (int r = 0; r < 8; r++) {
        const float g = gate[r] > limit ? limit : gate[r];
        const float u = up[r] > limit ? limit : up[r] < -limit ? -limit : up[r];
        h[r] = g / (1.0f + exp_f32(-(act->alpha * g))) * (u + act->offset);
    }
}

static void glu_panel(const glu_job *job, const glu *net, int64_t p, const int64_t *tokens, int n, int64_t row) {
    float y[2][TOKENS][8] = {{{0}}}; /* a last panel of floats may fill less */
    float(*const both[2])[8] = {y[0], y[1]};
    panel_pair_times(&net->gate, p, &net->up, p, job->in, tokens, n, both);
    const size_t nbytes = (size_t)rows_in_panel(&net->gate, p) * sizeof(float);
    for (int i = 0; i < n; i++) {
        float h[8];
        swiglu(&net->act, y[0][i], y[1][i], h);
        memcpy(job->units + (row + i) * job->hidden->width + p * PANEL, h, nbytes);
    }
}

static void glu_units(void *arg, int64_t begin, int64_t end) {
    const glu_job *job = arg;
    const int64_t F = job->hidden->width;
    for (int64_t part = begin; part < end; part++) {
        const glu *net = &job->nets[part / job->parts];
        const int64_t first = part % job->parts * job->unit_chunk;
        const int64_t last = first + job->unit_chunk < F ? first + job->unit_chunk : F;
        int64_t tokens[TOKENS];
        for (int64_t t = 0; t < net->num_tokens; t += TOKENS) {
            const int n = next_tokens(net->tokens, t, net->num_tokens, tokens);
            for (int64_t p = first / PANEL; p * PANEL < last; p++) glu_panel(job, net, p, tokens, n, net->row + t);
            for (int i = 0; i < n; i++) code_columns(job->hidden, net->row + t + i, first, last);
        }
    }
}

static void glu_outputs(void *arg, int64_t begin, int64_t end) {
    const glu_job *job = arg;
    for (int64_t part = begin; part < end; part++) {
        const glu *net = &job->nets[part / job->parts];
        const int64_t panels = panels_of(&net->down), first = part % job->parts * job->panel_chunk;
        const int64_t last = first + job->panel_chunk < panels ? first + job->panel_chunk : panels;
        for (int64_t t = 0; t < net->num_tokens; t += TOKENS) {
            int64_t rows[TOKENS];
            const int n = next_tokens(NULL, t, net->num_tokens, rows);
            for (int i = 0; i < n; i++) rows[i] += net->row;
            matrix_panels(&net->down, first, last, job->hidden, rows, n, STORE, job->out);
        }
    }
}

static void run_glu(colibri_context *ctx, const glu *nets, int64_t num_nets, const input *in, const input *hidden, float *units, float *out) {
    if (num_nets == 0) return;
    const colibri_matrix *down = &nets[0].down;
    glu_job job = {.nets = nets, .num_nets = num_nets, .in = in, .hidden = hidden, .units = units, .out = out};
    job.unit_chunk = !is_coded(down->format) ? PANEL : coded_group(down->format) > 64 ? LARGEST_GROUP : 64;
    job.parts = (hidden->width + job.unit_chunk - 1) / job.unit_chunk;
    pool_run(ctx->pool, glu_units, &job, num_nets * job.parts, 1);
    job.panel_chunk = panel_grain(ctx, down, num_nets * panels_of(down), nets[0].num_tokens);
    job.parts = (panels_of(down) + job.panel_chunk - 1) / job.panel_chunk;
    pool_run(ctx->pool, glu_outputs, &job, num_nets * job.parts, 1);
}

/* Memory of one feed-forward layer; `needed` are the groups of its first and of its second product. */
typedef struct {
    float *normed, *units, *out;
    input in, hidden;
} ffn_memory;

static ffn_memory take_ffn(bump *b, const float *x, int64_t rows, int64_t D, int64_t F, float top, int needed_in, int needed_down) {
    ffn_memory m = {0};
    m.normed = x ? NULL : take_floats(b, rows * D);
    m.units = take_floats(b, rows * F);
    m.out = take_floats(b, rows * D);
    m.in = take_input(b, x ? x : m.normed, rows, D, top, needed_in);
    m.hidden = take_input(b, m.units, rows, F, top, needed_down);
    return m;
}

/* out = ffn(norm(x)), or ffn(x) where the layer has no norm; `memory->out` holds it. */
static int32_t run_ffn(colibri_context *ctx, const colibri_ffn *layer, const float *x, int32_t rows, bump *b, ffn_memory *memory) {
    const int64_t D = layer->gate_proj.columns, F = layer->gate_proj.rows;
    const colibri_matrix *const first[2] = {&layer->gate_proj, &layer->up_proj}, *const second[1] = {&layer->down_proj};
    *memory = take_ffn(b, layer->norm.weight ? NULL : x, rows, D, F, top_code(ctx), groups_needed(ctx, first, 2), groups_needed(ctx, second, 1));
    if (!fits(b)) return COLIBRI_WORKSPACE;
    if (layer->norm.weight) norm_input(ctx, &memory->in, &layer->norm, x, memory->normed, rows);
    else code_input(ctx, &memory->in, rows);
    const glu net = {layer->gate_proj, layer->up_proj, layer->down_proj, layer->act, NULL, rows, 0};
    run_glu(ctx, &net, 1, &memory->in, &memory->hidden, memory->units, memory->out);
    return COLIBRI_OK;
}

static int32_t ffn_step(colibri_context *ctx, const colibri_ffn *layer, const float *x, int32_t rows, float *y) {
    bump b = bump_of(ctx);
    ffn_memory memory;
    const int32_t code = run_ffn(ctx, layer, x, rows, &b, &memory);
    if (code != COLIBRI_OK) return code;
    const int64_t n = (int64_t)rows * layer->gate_proj.columns;
    for (int64_t i = 0; i < n; i++) y[i] += memory.out[i];
    return COLIBRI_OK;
}

static int32_t head_step(colibri_context *ctx, const colibri_norm *norm, const colibri_matrix *lm_head, const float *x, int32_t rows, float *out) {
    bump b = bump_of(ctx);
    float *normed = take_floats(&b, (int64_t)rows * lm_head->columns);
    const input in = take_input(&b, normed, rows, lm_head->columns, top_code(ctx), groups_needed(ctx, &lm_head, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    norm_input(ctx, &in, norm, x, normed, rows);
    linear_one(ctx, lm_head, &in, rows, out, STORE);
    return COLIBRI_OK;
}

#endif
