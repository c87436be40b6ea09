/* What is computed row by row: projections of a common input, norms of groups, activations, decay factors. */
#ifndef COLIBRI_KERN_ROWS_H
#define COLIBRI_KERN_ROWS_H

#include "kern_dense.h"

static int32_t project(colibri_context *ctx, const colibri_norm *norm, const colibri_matrix *const *matrices, int32_t num_matrices, const float *x,
                       int32_t rows, float *const *out) {
    const int64_t D = matrices[0]->columns;
    bump b = bump_of(ctx);
    float *normed = norm ? take_floats(&b, rows * D) : NULL;
    const input in = take_input(&b, norm ? normed : x, rows, D, top_code(ctx), groups_needed(ctx, matrices, num_matrices));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    if (norm) norm_input(ctx, &in, norm, x, normed, rows);
    else code_input(ctx, &in, rows);
    for (int first = 0; first < num_matrices; first += MOST_MATRICES) {
        const int num = num_matrices - first < MOST_MATRICES ? num_matrices - first : MOST_MATRICES;
        linear_job job = {.in = &in, .rows = rows, .num_matrices = num, .add = STORE};
        for (int i = 0; i < num; i++) job.matrices[i] = matrices[first + i], job.out[i] = out[first + i];
        linear(ctx, &job);
    }
    return COLIBRI_OK;
}

/* Row t of `out` [rows, width] is made of row t of x and of `other`, which are `x_stride` and `other_stride` floats apart. */
typedef struct {
    const void *layer;
    const float *x, *other;
    int64_t x_stride, other_stride, width;
    float *out;
    int32_t kind;
} rows_job;

static void run_rows(colibri_context *ctx, pool_work work, rows_job *job, int64_t rows) {
    const int64_t small = 4096 / (job->width > 0 ? job->width : 1); /* rows that are not worth a wake each */
    pool_run(ctx->pool, work, job, rows, small > 0 ? small : 1);
}

INLINE float activated(int32_t kind, float x) {
    return kind == COLIBRI_SIGMOID_OF ? sigmoid(x) : kind == COLIBRI_SILU_OF ? silu(x) : kind == COLIBRI_SOFTPLUS_OF ? softplus(x) : exp_f32(x);
}

INLINE void activate_row(int32_t kind, const float *restrict x, int64_t n, float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] = activated(kind, x[i]);
}

static void activate_rows(void *arg, int64_t begin, int64_t end) {
    const rows_job *job = arg;
    for (int64_t t = begin; t < end; t++) {
        const float *x = job->x + t * job->x_stride;
        float *out = job->out + t * job->width;
        switch (job->kind) {
        case COLIBRI_SIGMOID_OF: activate_row(COLIBRI_SIGMOID_OF, x, job->width, out); break;
        case COLIBRI_SILU_OF: activate_row(COLIBRI_SILU_OF, x, job->width, out); break;
        case COLIBRI_SOFTPLUS_OF: activate_row(COLIBRI_SOFTPLUS_OF, x, job->width, out); break;
        default: activate_row(COLIBRI_EXP_OF, x, job->width, out); break;
        }
    }
}

static int32_t activate(colibri_context *ctx, int32_t kind, const float *x, int64_t x_stride, int32_t rows, int32_t width, float *out) {
    rows_job job = {.x = x, .x_stride = x_stride, .width = width, .out = out, .kind = kind};
    run_rows(ctx, activate_rows, &job, rows);
    return COLIBRI_OK;
}

static void norm_group(const colibri_group_norm *norm, const float *restrict weight, const float *restrict x, const float *restrict gate,
                       float *restrict out) {
    const int64_t n = norm->width;
    const float scale = 1.0f / root_of_squares(x, n, norm->of_sum ? 1.0f : (float)n, norm->eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale;
    for (int64_t i = 0; weight && i < n; i++) out[i] *= weight[i];
    if (norm->gate == COLIBRI_GATED_BY_SIGMOID) {
        for (int64_t i = 0; i < n; i++) out[i] *= sigmoid(gate[i]);
    } else if (norm->gate == COLIBRI_GATED_BY_SILU) {
        for (int64_t i = 0; i < n; i++) out[i] *= silu(gate[i]);
    }
}

static void norm_row_groups(void *arg, int64_t begin, int64_t end) {
    const rows_job *job = arg;
    const colibri_group_norm *norm = job->layer;
    for (int64_t t = begin; t < end; t++) {
        for (int64_t i = 0; i < job->width; i += norm->width) {
            const float *gate = job->other ? job->other + t * job->other_stride + i : NULL;
            const float *weight = norm->weight && norm->num_weights > norm->width ? norm->weight + i : norm->weight;
            norm_group(norm, weight, job->x + t * job->x_stride + i, gate, job->out + t * job->width + i);
        }
    }
}

static int32_t norm_rows(colibri_context *ctx, const colibri_group_norm *norm, const float *x, int64_t x_stride, const float *gate,
                         int64_t gate_stride, int32_t rows, int32_t width, float *out) {
    rows_job job = {norm, x, gate, x_stride, gate_stride, width, out, 0};
    if (norm->weight && norm->num_weights > norm->width && norm->num_weights != width) return COLIBRI_ARGUMENT;
    if (width % norm->width || (norm->gate != COLIBRI_UNGATED && !gate)) return COLIBRI_ARGUMENT;
    run_rows(ctx, norm_row_groups, &job, rows);
    return COLIBRI_OK;
}

static void decay_row_heads(void *arg, int64_t begin, int64_t end) {
    const rows_job *job = arg;
    const colibri_decay *layer = job->layer;
    const int64_t n = layer->width;
    const float bound = layer->lower_bound;
    for (int64_t t = begin; t < end; t++) {
        for (int64_t h = 0; h < layer->heads; h++) {
            const float rate = exp_f32(layer->a_log[h]), *restrict a = job->x + t * job->x_stride + h * n, *restrict bias = layer->bias + h * n;
            float *restrict out = job->out + t * job->width + h * n;
            if (bound == 0.0f) {
                for (int64_t i = 0; i < n; i++) out[i] = exp_f32(-rate * softplus(a[i] + bias[i]));
            } else {
                for (int64_t i = 0; i < n; i++) out[i] = exp_f32(bound * sigmoid(rate * (a[i] + bias[i])));
            }
        }
    }
}

static int32_t decay_rows(colibri_context *ctx, const colibri_decay *layer, const float *a, int64_t a_stride, int32_t rows, float *out) {
    rows_job job = {.layer = layer, .x = a, .x_stride = a_stride, .width = (int64_t)layer->heads * layer->width, .out = out};
    run_rows(ctx, decay_row_heads, &job, rows);
    return COLIBRI_OK;
}

#endif
