/* Attention of one layer: projections, rope, the K/V pool, and the sum over keys. */
#ifndef COLIBRI_KERN_ATTENTION_H
#define COLIBRI_KERN_ATTENTION_H

#include "kern_attend.h"

static void norm_heads(const colibri_norm *norm, float *x, int64_t width) {
    if (!norm->weight) return;
    for (int64_t i = 0; i < width; i += norm->width) rms_norm(x + i, norm->weight, norm->eps, norm->width, x + i);
}

static void clip_values(float *x, int64_t n, float clip) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] < -clip ? -clip : x[i] > clip ? clip : x[i];
}

/* Turns each head's leading rotary_dim. */
static void rope_heads(const colibri_attention *layer, const float *cos, const float *sin, float *x, int heads) {
    for (int h = 0; h < heads; h++) rope_row(layer->rope_pairs, layer->rotary_dim / 2, cos, sin, x + h * layer->head_dim);
}

/* Rounds one head's k or v to items [hd]; int8 rows have a scale among the others of the head. */
static void round_row(const attention_job *job, const float *x, uint8_t *items, uint8_t *scale) {
    const int64_t hd = job->layer->head_dim;
    if (job->kv->format != INT8_ROWS_CODE) {
        narrow(job->kv->format, x, hd, items);
        return;
    }
    const float found = narrow_row(x, hd, items);
    memcpy(scale, &found, sizeof found);
}

/* Rounds k into its column of the keys, and v into its row of the values. */
static void put_head(const attention_job *job, uint8_t *keys, int64_t head, int64_t place, const float *k, const float *v) {
    const int64_t hd = job->layer->head_dim, size = item_size(job->kv->format);
    uint8_t items[4 * MOST_HEAD_DIM], *values = keys + keys_nbytes(job);
    uint8_t *column = keys + head * head_nbytes(job) + place * size;
    round_row(job, k, items, scales_of(job, keys, head) + 4 * place);
    for (int64_t d = 0; d < hd; d++) memcpy(column + d * BLOCK * size, items + d * size, (size_t)size);
    round_row(job, v, values + head * head_nbytes(job) + place * hd * size, scales_of(job, values, head) + 4 * place);
}

/* The q of each head, which its gate follows. */
static void take_queries(const attention_job *job, int64_t t, float *q) {
    const int64_t hd = job->layer->head_dim, H = job->layer->num_heads;
    for (int64_t h = 0; h < H; h++) memcpy(q + h * hd, job->pairs + (t * H + h) * 2 * hd, (size_t)hd * sizeof *q);
}

static void gate_rows(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    const int64_t hd = job->layer->head_dim, H = job->layer->num_heads;
    for (int64_t i = begin * H; i < end * H; i++) {
        const float *restrict gate = job->pairs + i * 2 * hd + hd;
        float *restrict mixed = job->mixed + i * hd;
        for (int64_t d = 0; d < hd; d++) mixed[d] *= sigmoid(gate[d]);
    }
}

/* q, k and v of rows [begin, end) become final; k and v are rounded into the pool. */
static void finish_projections(void *arg, int64_t begin, int64_t end) {
    const attention_job *job = arg;
    const colibri_attention *layer = job->layer;
    const int64_t hd = layer->head_dim, q_width = layer->num_heads * hd, kv_width = layer->num_kv_heads * hd;
    for (int64_t t = begin; t < end; t++) {
        float *q = job->q + t * q_width, *k = job->k + t * kv_width, *v = job->v + t * kv_width;
        const int64_t half = layer->rotary_dim / 2, position = job->batch->positions[t];
        if (job->pairs) take_queries(job, t, q);
        norm_heads(&layer->q_norm, q, q_width);
        norm_heads(&layer->k_norm, k, kv_width);
        clip_values(q, q_width, layer->clip);
        clip_values(k, kv_width, layer->clip);
        clip_values(v, kv_width, layer->clip);
        rope_heads(layer, job->batch->cos + t * half, job->batch->sin + t * half, q, layer->num_heads);
        rope_heads(layer, job->batch->cos + t * half, job->batch->sin + t * half, k, layer->num_kv_heads);
        uint8_t *keys = key_of(job, t, position);
        for (int64_t h = 0; h < layer->num_kv_heads; h++) {
            put_head(job, keys, h, position % BLOCK, k + h * hd, v + h * hd);
        }
    }
}

typedef struct {
    float *normed, *pairs, *q, *k, *v, *mixed, *parts;
    input in, mixed_in;
} attention_memory;

static attention_memory take_attention(bump *b, int64_t rows, int64_t D, int64_t q_width, int64_t kv_width, int gated, float top, int needed_in,
                                       int needed_out) {
    attention_memory m = {0};
    m.normed = take_floats(b, rows * D);
    m.pairs = gated ? take_floats(b, rows * 2 * q_width) : NULL;
    m.q = take_floats(b, rows * q_width);
    m.k = take_floats(b, rows * kv_width);
    m.v = take_floats(b, rows * kv_width);
    m.mixed = take_floats(b, rows * q_width);
    m.parts = take_floats(b, PART_ROWS * q_width);
    m.in = take_input(b, m.normed, rows, D, top, needed_in);
    m.mixed_in = take_input(b, m.mixed, rows, q_width, top, needed_out);
    return m;
}

static int32_t attention_step(colibri_context *ctx, const colibri_attention *layer, const float *x, const colibri_batch *batch,
                              const colibri_kv *kv, float *y) {
    const int64_t rows = batch->rows, D = batch->hidden_size, hd = layer->head_dim;
    const colibri_matrix *const first[3] = {&layer->q_proj, &layer->k_proj, &layer->v_proj}, *const second[1] = {&layer->o_proj};
    bump b = bump_of(ctx);
    attention_memory m = take_attention(&b, rows, D, layer->num_heads * hd, layer->num_kv_heads * hd, layer->gated, top_code(ctx),
                                        groups_needed(ctx, first, 3), groups_needed(ctx, second, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    attention_job job = {.layer = layer, .batch = batch, .kv = kv, .q = m.q, .k = m.k, .v = m.v, .mixed = m.mixed, .parts = m.parts, .pairs = m.pairs};
    if (hd > MOST_HEAD_DIM || (ctx->where = bad_row(&job)) >= 0) return COLIBRI_ARGUMENT;
    norm_input(ctx, &m.in, &layer->norm, x, m.normed, rows);
    linear_job projections = {&m.in, rows, 3, STORE, {first[0], first[1], first[2]}, {m.pairs ? m.pairs : m.q, m.k, m.v}};
    linear(ctx, &projections);
    pool_run(ctx->pool, finish_projections, &job, rows, pool_grain(ctx->pool, rows, BLOCK));
    attend_all(ctx, &job);
    if (layer->gated) pool_run(ctx->pool, gate_rows, &job, rows, 1);
    code_input(ctx, &m.mixed_in, rows);
    linear_one(ctx, &layer->o_proj, &m.mixed_in, rows, y, ADD);
    return COLIBRI_OK;
}

/* The same without projections, which the caller makes. */
static int32_t attend_heads(colibri_context *ctx, const colibri_attention *layer, const colibri_heads *heads, const colibri_batch *batch,
                            const colibri_kv *kv, float *out) {
    const int64_t rows = batch->rows, hd = layer->head_dim, q_width = layer->num_heads * hd;
    bump b = bump_of(ctx);
    float *q = layer->gated ? take_floats(&b, rows * q_width) : heads->q, *parts = take_floats(&b, PART_ROWS * q_width);
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    attention_job job = {.layer = layer, .batch = batch, .kv = kv, .q = q, .k = heads->k, .v = heads->v, .mixed = out, .parts = parts};
    job.pairs = layer->gated ? heads->q : NULL, job.relative = heads->relative, job.temperature = heads->temperature;
    job.selected = heads->selected, job.most_selected = heads->most_selected;
    if (hd > MOST_HEAD_DIM || layer->relative_rank > MOST_RELATIVE || (ctx->where = bad_row(&job)) >= 0) return COLIBRI_ARGUMENT;
    pool_run(ctx->pool, finish_projections, &job, rows, pool_grain(ctx->pool, rows, BLOCK));
    attend_all(ctx, &job);
    if (layer->gated) pool_run(ctx->pool, gate_rows, &job, rows, 1);
    return COLIBRI_OK;
}

#endif
