/* Attention of many heads over one key a position, its own value, in a window, and over entries of the whole past. */
#ifndef COLIBRI_KERN_SHARED_KEY_H
#define COLIBRI_KERN_SHARED_KEY_H

#include "kern_index.h"
#include "kern_lane_attend.h"
#include "kern_pooling.h"

typedef struct {
    const colibri_shared_key *layer;
    const colibri_batch *batch;
    const colibri_shared_key_state *state;
    float *q, *k;
    int64_t first; /* the row that keys are written from */
} shared_key_job;

typedef struct {
    const colibri_batch *batch;
    float *x; /* [rows, heads, head_dim] */
    int64_t heads, head_dim, rotary_dim;
    int back;
} turn_job;

/* The trailing pairs of all heads are rotated, or rotated back. */
static void turn_rows(void *arg, int64_t begin, int64_t end) {
    const turn_job *job = arg;
    const int64_t half = job->rotary_dim / 2;
    float back[MOST_ROPE_DIM / 2];
    for (int64_t t = begin; t < end; t++) {
        const float *cos = job->batch->cos + t * half, *sin = job->batch->sin + t * half;
        for (int64_t i = 0; i < half; i++) back[i] = -sin[i];
        for (int64_t h = 0; h < job->heads; h++) {
            rope_row(1, half, cos, job->back ? back : sin, job->x + (t * job->heads + h + 1) * job->head_dim - job->rotary_dim);
        }
    }
}

static void turn(colibri_context *ctx, const colibri_batch *batch, float *x, int64_t heads, int64_t head_dim, int64_t rotary_dim, int back) {
    turn_job job = {batch, x, heads, head_dim, rotary_dim, back};
    pool_run(ctx->pool, turn_rows, &job, batch->rows, 1);
}

static int32_t select_entries(colibri_context *ctx, const colibri_entry_indexer *layer, const colibri_batch *batch, const colibri_plane *plane,
                              float *q, const float *weights, int32_t *selected) {
    bump b = bump_of(ctx);
    const int64_t most = INDEX_ROWS * entries_seen((int64_t)batch->table_width * BLOCK - 1, plane->stride);
    index_job job = {.batch = batch, .plane = plane, .q = q, .weights = weights, .scores = take_floats(&b, most), .selected = selected};
    job.heads = layer->num_heads, job.head_dim = layer->head_dim, job.top_k = layer->top_k, job.scale = layer->scale;
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    if (job.heads > MOST_INDEX_HEADS || job.head_dim > MOST_INDEX_DIM || layer->rotary_dim > MOST_ROPE_DIM) return COLIBRI_ARGUMENT;
    if ((ctx->where = bad_plane_row(plane, batch)) >= 0) return COLIBRI_ARGUMENT;
    turn(ctx, batch, q, job.heads, job.head_dim, layer->rotary_dim, 0);
    index_rows(ctx, &job, 0, batch->rows, most);
    return COLIBRI_OK;
}

/* Positions of its window that a row sees. */
static int64_t window_keys(const shared_key_job *job, int64_t row) {
    const int64_t num = (int64_t)job->batch->positions[row] + 1;
    return num < job->layer->window ? num : job->layer->window;
}

static int64_t entry_keys(const shared_key_job *job, int64_t row) {
    return job->state->entry.width ? entries_seen(job->batch->positions[row], job->state->entry.stride) : 0;
}

static int64_t shared_keys(const void *keys, int64_t row) {
    const shared_key_job *job = keys;
    const int64_t entries = entry_keys(job, row), top_k = job->layer->top_k;
    return window_keys(job, row) + (top_k > 0 && entries > top_k ? top_k : entries);
}

/* A window's row of a position: its items. */
static uint8_t *window_row(const shared_key_job *job, int64_t row, int64_t position) {
    const colibri_window *w = &job->state->key;
    uint8_t *cell = (uint8_t *)cell_of(&w->cells, job->state->rows, row);
    return cell + position % w->positions * w->width * item_size(w->format);
}

static uint8_t *window_scale(const shared_key_job *job, int64_t row, int64_t position) {
    const colibri_window *w = &job->state->key;
    return (uint8_t *)cell_of(&w->cells, job->state->rows, row) + (int64_t)w->positions * w->width + position % w->positions * 4;
}

/* The position in the window (and -1), or the entry, of a row's key `rank`: the window ascending, then entries ascending. */
static int64_t entry_of(const shared_key_job *job, int64_t row, int64_t rank, int64_t *position) {
    const int64_t near = window_keys(job, row), top_k = job->layer->top_k;
    *position = job->batch->positions[row] - near + 1 + rank;
    if (rank < near) return -1;
    const int selects = top_k > 0 && entry_keys(job, row) > top_k;
    return selects ? job->state->selected[row * top_k + rank - near] : rank - near;
}

static void widen_shared(const void *keys, int64_t row, int64_t rank, int n, float *to) {
    const shared_key_job *job = keys;
    const colibri_window *w = &job->state->key;
    for (int j = 0; j < n; j++) {
        int64_t position;
        const int64_t entry = entry_of(job, row, rank + j, &position);
        float *x = to + j * job->layer->head_dim;
        if (entry >= 0) get_entry(&job->state->entry, job->batch, row, entry, x);
        else get_row(w->format, w->width, window_row(job, row, position), window_scale(job, row, position), x);
    }
}

static void fetch_shared(const void *keys, int64_t row, int64_t rank, int n) {
    const shared_key_job *job = keys;
    const colibri_window *w = &job->state->key;
    for (int j = 0; j < n; j++) {
        int64_t position;
        const int64_t entry = entry_of(job, row, rank + j, &position);
        if (entry >= 0) fetch_entry(&job->state->entry, job->batch, row, entry);
        else fetch(window_row(job, row, position), (int64_t)w->width * item_size(w->format));
    }
}

/* The first row whose blocks are out of range or whose selection names what it does not see, or -1. */
static int32_t bad_shared_row(const shared_key_job *job) {
    const int64_t top_k = job->layer->top_k;
    const colibri_window *w = &job->state->key;
    const int64_t nbytes = w->positions * ((int64_t)w->width * item_size(w->format) + (w->format == INT8_ROWS_CODE ? 4 : 0));
    int32_t row = bad_cell(&w->cells, job->state->rows, (nbytes + 3) / 4);
    for (int32_t t = 0; row < 0 && t < job->batch->rows; t++) row = job->batch->positions[t] < 0 ? t : -1;
    if (row < 0 && job->state->entry.width) row = bad_plane_row(&job->state->entry, job->batch);
    for (int32_t t = 0; row < 0 && top_k > 0 && t < job->batch->rows; t++) {
        const int64_t entries = entry_keys(job, t);
        if (entries <= top_k) continue;
        if (!job->state->selected) return t;
        for (int64_t i = 0; i < top_k; i++) {
            const int32_t entry = job->state->selected[t * top_k + i];
            if (entry < 0 || entry >= entries) return t;
        }
    }
    return row;
}

static void keep_keys(void *arg, int64_t begin, int64_t end) {
    const shared_key_job *job = arg;
    const colibri_window *w = &job->state->key;
    for (int64_t t = job->first + begin; t < job->first + end; t++) {
        const int64_t position = job->batch->positions[t];
        put_row(w->format, w->width, job->k + t * w->width, window_row(job, t, position), window_scale(job, t, position));
    }
}

static int32_t shared_key_rows(colibri_context *ctx, const colibri_shared_key *layer, const colibri_batch *batch, const colibri_shared_key_state *state,
                               float *q, float *k) {
    const int64_t hd = layer->head_dim, H = layer->num_heads;
    shared_key_job job = {layer, batch, state, q, k, 0};
    bump b = bump_of(ctx);
    lane_job lanes = {.keys = &job, .seen = shared_keys, .widen = widen_shared, .fetch = fetch_shared, .queries = q, .sinks = layer->sinks};
    lanes.parts = take_floats(&b, LANE_PARTS * part_size(hd));
    lanes.heads = H, lanes.scale = layer->scale, lanes.value_width = hd, lanes.key_width = hd;
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    if (hd > MOST_LATENT || layer->rotary_dim > MOST_ROPE_DIM || layer->window < 1 || state->key.width != hd) return COLIBRI_ARGUMENT;
    if (state->key.positions < layer->window + COLIBRI_WINDOW_SLACK || state->rows->rows != batch->rows) return COLIBRI_ARGUMENT;
    if ((ctx->where = bad_shared_row(&job)) >= 0) return COLIBRI_ARGUMENT;
    turn(ctx, batch, k, 1, hd, layer->rotary_dim, 0);
    turn(ctx, batch, q, H, hd, layer->rotary_dim, 0);
    for (int64_t first = 0; first < batch->rows; first += COLIBRI_WINDOW_SLACK) { /* later keys take the places of earlier ones */
        const int64_t left = batch->rows - first, rows = left < COLIBRI_WINDOW_SLACK ? left : COLIBRI_WINDOW_SLACK;
        job.first = lanes.first = first, lanes.rows = rows, lanes.queries = q + first * H * hd;
        pool_run(ctx->pool, keep_keys, &job, rows, 16);
        attend_lanes(ctx, &lanes);
    }
    turn(ctx, batch, q, H, hd, layer->rotary_dim, 1);
    return COLIBRI_OK;
}

/* Groups of rows of a matrix, each times its own columns, which `in` holds apart: [groups, rows, K]. */
typedef struct {
    const colibri_matrix *m;
    const input *in;
    int64_t groups, rows;
    const float *x;
    float *apart, *out;
} groups_job;

static void part_rows(void *arg, int64_t begin, int64_t end) {
    const groups_job *job = arg;
    const int64_t K = job->m->columns;
    for (int64_t i = begin; i < end; i++) {
        memcpy(job->apart + i * K, job->x + (i % job->rows * job->groups + i / job->rows) * K, (size_t)K * sizeof *job->x);
        code_columns(job->in, i, 0, K);
    }
}

static void group_panels(void *arg, int64_t begin, int64_t end) {
    const groups_job *job = arg;
    const int64_t panels = panels_of(job->m) / job->groups;
    for (int64_t t = 0; t < job->rows; t += TOKENS) {
        int64_t tokens[TOKENS], apart[TOKENS];
        const int n = next_tokens(NULL, t, job->rows, tokens);
        for (int64_t p = begin; p < end; p++) {
            float y[TOKENS][8];
            for (int i = 0; i < n; i++) apart[i] = p / panels * job->rows + tokens[i];
            panel_times(job->m, p, job->in, apart, n, y);
            put_panel(job->m, p, tokens, n, STORE, y, job->out);
        }
    }
}

static int32_t matmul_groups(colibri_context *ctx, const colibri_matrix *m, int32_t num_groups, const float *x, int32_t rows, float *out) {
    const int64_t K = m->columns;
    if (num_groups < 1 || m->rows % ((int64_t)num_groups * PANEL)) return COLIBRI_ARGUMENT;
    bump b = bump_of(ctx);
    float *apart = take_floats(&b, (int64_t)num_groups * rows * K);
    const input in = take_input(&b, apart, (int64_t)num_groups * rows, K, top_code(ctx), groups_needed(ctx, &m, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    groups_job job = {m, &in, num_groups, rows, x, apart, out};
    pool_run(ctx->pool, part_rows, &job, (int64_t)num_groups * rows, 1);
    pool_run(ctx->pool, group_panels, &job, panels_of(m), panel_grain(ctx, m, panels_of(m), rows));
    return COLIBRI_OK;
}

#endif
