/* Multi-head latent attention, always absorbed: projections, what positions keep, selection, and the rows in turn. */
#ifndef COLIBRI_KERN_LATENT_H
#define COLIBRI_KERN_LATENT_H

#include "kern_latent_attend.h"
#include "kern_pooling.h"

static void latent_norm(const colibri_norm *norm, float *x) { rms_norm(x, norm->weight, norm->eps, norm->width, x); }

/* What a position keeps becomes final and is rounded into the pool. */
static void keep_positions(void *arg, int64_t begin, int64_t end) {
    const latent_job *job = arg;
    const colibri_latent *layer = job->layer;
    const colibri_indexer *index = &layer->indexer;
    for (int64_t t = begin; t < end; t++) {
        float *kv = job->kv + t * job->key_width;
        const int64_t position = job->batch->positions[t], half = layer->rotary_dim / 2;
        const float *cos = job->batch->cos + t * half, *sin = job->batch->sin + t * half;
        if (job->q_low) latent_norm(&layer->q_norm, job->q_low + t * layer->q_norm.width);
        latent_norm(&layer->kv_norm, kv);
        rope_row(layer->rope_pairs, half, cos, sin, kv + job->r);
        put_entry(&job->state->latent, job->batch, t, position, kv);
        put_entry(&job->state->rope_key, job->batch, t, position, kv + job->r);
        if (index->q_proj.rows == 0) continue;
        float *k = job->index_key + t * index->head_dim;
        layer_norm(k, index->k_norm.weight, index->k_norm_bias, index->k_norm.eps, index->head_dim, k);
        rope_row(index->rope_pairs, index->rotary_dim / 2, cos, sin, k);
        if (index->pooling.stride == 0) put_entry(&job->state->index_key, job->batch, t, position, k);
    }
}

/* Sizes of a layer, or the largest of all layers. */
typedef struct {
    int64_t hidden_size, heads, q_rank, head_dim, value_dim, latent, key_width, index_heads, index_dim, positions;
} latent_sizes;

typedef struct {
    float *normed, *q_low, *kv, *index_key, *index_gates, *index_weights, *q, *queries, *values, *parts, *index_q, *scores;
    int64_t rows_at_once, num_scores;
    input in, q_in, values_in;
} latent_memory;

static latent_memory take_latent(bump *b, int64_t rows, const latent_sizes *s, float top, int in, int q_in, int out) {
    latent_memory m = {0};
    const int64_t n = rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE;
    m.rows_at_once = n;
    m.normed = take_floats(b, rows * s->hidden_size);
    m.q_low = s->q_rank ? take_floats(b, rows * s->q_rank) : m.normed;
    m.kv = take_floats(b, rows * s->key_width);
    m.q = take_floats(b, n * s->heads * s->head_dim);
    m.queries = take_floats(b, n * s->heads * s->key_width);
    m.values = take_floats(b, n * s->heads * s->value_dim);
    m.parts = take_floats(b, LANE_PARTS * part_size(s->latent));
    m.index_key = take_floats(b, rows * s->index_dim);
    m.index_gates = take_floats(b, rows * s->index_dim);
    m.index_weights = take_floats(b, rows * s->index_heads);
    m.index_q = take_floats(b, n * s->index_heads * s->index_dim);
    m.num_scores = INDEX_ROWS * s->positions;
    m.scores = take_floats(b, m.num_scores);
    m.in = take_input(b, m.normed, rows, s->hidden_size, top, in);
    m.q_in = take_input(b, m.q_low, n, s->q_rank ? s->q_rank : s->hidden_size, top, q_in);
    m.values_in = take_input(b, m.values, n, s->heads * s->value_dim, top, out);
    return m;
}

static latent_sizes sizes_of(const colibri_latent *layer, const colibri_batch *batch) {
    const int has_index = layer->indexer.q_proj.rows > 0;
    return (latent_sizes){
        .hidden_size = batch->hidden_size,
        .heads = layer->num_heads,
        .q_rank = layer->q_a_proj.rows,
        .head_dim = layer->nope_dim + layer->rope_dim,
        .value_dim = layer->value_dim,
        .latent = layer->kv_norm.width,
        .key_width = layer->kv_norm.width + layer->rope_dim,
        .index_heads = has_index ? layer->indexer.num_heads : 0,
        .index_dim = has_index ? layer->indexer.head_dim : 0,
        .positions = has_index ? (int64_t)batch->table_width * BLOCK : 0,
    };
}

static int32_t bad_latent_row(const colibri_latent *layer, const colibri_batch *batch, const colibri_latent_state *state) {
    int32_t row = bad_plane_row(&state->latent, batch);
    if (row < 0) row = bad_plane_row(&state->rope_key, batch);
    if (row < 0 && layer->indexer.q_proj.rows > 0) row = bad_plane_row(&state->index_key, batch);
    return row;
}

typedef struct {
    const latent_job *job;
    float *q;
} rope_job;

/* The indexer's queries of rows at hand are rotated. */
static void rotate_index_rows(void *arg, int64_t begin, int64_t end) {
    const rope_job *rope = arg;
    const colibri_indexer *index = &rope->job->layer->indexer;
    const int64_t half = index->rotary_dim / 2;
    for (int64_t t = begin; t < end; t++) {
        const int64_t row = rope->job->first + t;
        for (int64_t h = 0; h < index->num_heads; h++) {
            rope_row(index->rope_pairs, half, rope->job->batch->cos + row * half, rope->job->batch->sin + row * half,
                     rope->q + (t * index->num_heads + h) * index->head_dim);
        }
    }
}

static void select_keys(colibri_context *ctx, const latent_job *job, const latent_memory *m) {
    const colibri_indexer *index = &job->layer->indexer;
    rope_job rope = {job, m->index_q};
    linear_one(ctx, &index->q_proj, &m->q_in, job->rows, m->index_q, STORE);
    pool_run(ctx->pool, rotate_index_rows, &rope, job->rows, 1);
    index_job choice = {.heads = index->num_heads, .head_dim = index->head_dim, .scale = index->scale, .batch = job->batch, .q_row = job->first};
    choice.plane = &job->state->index_key, choice.q = m->index_q;
    choice.weights = m->index_weights, choice.scores = m->scores, choice.selected = job->state->selected, choice.top_k = job->layer->top_k;
    index_rows(ctx, &choice, job->first, job->rows, m->num_scores);
}

/* Low-rank projections of all rows, and what their positions keep. */
static int32_t project_latents(colibri_context *ctx, latent_job *job, latent_memory *m, const float *x) {
    const colibri_latent *layer = job->layer;
    const colibri_indexer *index = &layer->indexer;
    const int64_t rows = job->batch->rows;
    norm_input(ctx, &m->in, &layer->norm, x, m->normed, rows);
    linear_one(ctx, &layer->kv_a_proj, &m->in, rows, m->kv, STORE);
    if (layer->q_a_proj.rows > 0) linear_one(ctx, &layer->q_a_proj, &m->in, rows, m->q_low, STORE);
    if (index->q_proj.rows > 0) {
        linear_job all = {&m->in, rows, 2, STORE, {&index->k_proj, &index->weights_proj}, {m->index_key, m->index_weights}};
        if (index->pooling.stride > 0) all.matrices[all.num_matrices] = &index->gate_proj, all.out[all.num_matrices++] = m->index_gates;
        linear(ctx, &all);
        for (int64_t i = 0; i < rows * index->num_heads; i++) m->index_weights[i] *= index->weight_scale;
    }
    pool_run(ctx->pool, keep_positions, job, rows, 1);
    if (index->q_proj.rows == 0 || index->pooling.stride == 0) return COLIBRI_OK;
    return pool_rows(ctx, &index->pooling, &job->state->sums, job->state->rows, job->batch, &job->state->index_key, m->index_key, m->index_gates);
}

static int32_t latent_step(colibri_context *ctx, const colibri_latent *layer, const float *x, const colibri_batch *batch,
                           const colibri_latent_state *state, float *y) {
    const colibri_indexer *index = &layer->indexer;
    const colibri_matrix *const first[5] = {&layer->kv_a_proj, &layer->q_a_proj, &index->k_proj, &index->weights_proj, &index->gate_proj};
    const colibri_matrix *const second[2] = {&layer->q_b_proj, &layer->indexer.q_proj}, *const third[1] = {&layer->o_proj};
    const latent_sizes sizes = sizes_of(layer, batch);
    bump b = bump_of(ctx);
    latent_memory m = take_latent(&b, batch->rows, &sizes, top_code(ctx), groups_needed(ctx, first, 5), groups_needed(ctx, second, 2),
                                  groups_needed(ctx, third, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    if (sizes.latent > MOST_LATENT || layer->rope_dim > MOST_ROPE_DIM || sizes.index_heads > MOST_INDEX_HEADS) return COLIBRI_ARGUMENT;
    if (sizes.index_dim > MOST_INDEX_DIM || (ctx->where = bad_latent_row(layer, batch, state)) >= 0) return COLIBRI_ARGUMENT;
    latent_job job = {.layer = layer, .batch = batch, .state = state, .kv = m.kv, .index_key = m.index_key, .q = m.q, .parts = m.parts,
                      .q_low = sizes.q_rank ? m.q_low : NULL, .queries = m.queries, .values = m.values, .r = sizes.latent, .key_width = sizes.key_width, .q_width = sizes.head_dim};
    const int32_t code = project_latents(ctx, &job, &m, x);
    if (code != COLIBRI_OK) return code;
    for (job.first = 0; job.first < batch->rows; job.first += m.rows_at_once) {
        job.rows = batch->rows - job.first < m.rows_at_once ? batch->rows - job.first : m.rows_at_once;
        m.q_in.x = m.q_low + job.first * m.q_in.width;
        code_input(ctx, &m.q_in, job.rows);
        linear_one(ctx, &layer->q_b_proj, &m.q_in, job.rows, m.q, STORE);
        if (sizes.index_heads > 0) select_keys(ctx, &job, &m);
        pool_run(ctx->pool, absorb_heads, &job, layer->num_heads, 1);
        attend_latents(ctx, &job);
        pool_run(ctx->pool, expand_heads, &job, layer->num_heads, 1);
        code_input(ctx, &m.values_in, job.rows);
        linear_one(ctx, &layer->o_proj, &m.values_in, job.rows, y + job.first * sizes.hidden_size, ADD);
    }
    return COLIBRI_OK;
}

#endif
