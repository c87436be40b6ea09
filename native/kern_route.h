/* Routing: the input norm, logits, and the choice of experts. */
#ifndef COLIBRI_KERN_ROUTE_H
#define COLIBRI_KERN_ROUTE_H

#include "kern_dense.h"

enum { MOST_GROUPS = 64 };

typedef struct {
    const colibri_router *layer;
    colibri_routing *routing;
    float *probabilities; /* [rows, E + shared experts] logits, then probabilities */
    float *choice;        /* [rows, E] what experts are chosen by */
    int32_t *bad;         /* [rows] */
} route_job;

static void softmax_row(float *x, int64_t n) {
    float max = x[0], sum = 0.0f;
    for (int64_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < n; i++) {
        x[i] = exp_f32(x[i] - max);
        sum += x[i];
    }
    for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

static void sigmoid_row(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = sigmoid(x[i]);
}

static void sqrt_softplus_row(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = __builtin_sqrtf(softplus(x[i]));
}

static void score_row(int32_t scoring, float *x, int64_t n) {
    switch (scoring) {
    case COLIBRI_SIGMOID: sigmoid_row(x, n); break;
    case COLIBRI_SQRT_SOFTPLUS: sqrt_softplus_row(x, n); break;
    default: softmax_row(x, n); break;
    }
}

static int finite_row(const float *x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) most = (bits_of(x[i]) & 0x7fffffff) > most ? bits_of(x[i]) & 0x7fffffff : most;
    return most < 0x7f800000;
}

static int64_t index_of_largest(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) best = x[i] > x[best] ? i : best;
    return best;
}

/* The k largest, descending, ties to the lowest index; a taken one becomes -inf. */
static void take_largest(float *x, int64_t n, int32_t k, int32_t *indices) {
    for (int32_t a = 0; a < k; a++) {
        indices[a] = (int32_t)index_of_largest(x, n);
        x[indices[a]] = -__builtin_inff();
    }
}

/* A group's score: the sum of its `top` largest, descending. Restores what it takes. */
static float group_score(float *x, int64_t n, int32_t top) {
    int32_t taken[16];
    float values[16], sum = 0.0f;
    top = top < n ? top : (int32_t)n;
    for (int32_t i = 0; i < top; i++) {
        taken[i] = (int32_t)index_of_largest(x, n);
        values[i] = x[taken[i]];
        x[taken[i]] = -__builtin_inff();
        sum += values[i];
    }
    for (int32_t i = 0; i < top; i++) x[taken[i]] = values[i];
    return sum;
}

static int64_t num_routed(const colibri_router *layer) { return layer->gate.rows - layer->num_shared; }

/* All but the best groups become -inf. */
static void keep_groups(const colibri_router *layer, float *choice) {
    const int64_t num = layer->num_groups, size = num_routed(layer) / num;
    float scores[MOST_GROUPS];
    int32_t kept[MOST_GROUPS];
    uint8_t is_kept[MOST_GROUPS] = {0};
    for (int64_t g = 0; g < num; g++) scores[g] = group_score(choice + g * size, size, layer->group_top);
    take_largest(scores, num, layer->num_groups_used, kept);
    for (int32_t i = 0; i < layer->num_groups_used; i++) is_kept[kept[i]] = 1;
    for (int64_t i = 0; i < num * size; i++) choice[i] = is_kept[i / size] ? choice[i] : -__builtin_inff();
}

static float weight_of(const colibri_router *layer, float probability, float sum) {
    return (layer->normalize ? probability / (sum + layer->epsilon) : probability) * layer->factor;
}

static void weigh(const colibri_router *layer, const float *probabilities, const int32_t *ids, float *weights, float *shared) {
    const int32_t A = layer->num_experts_per_tok;
    const float *of_shared = probabilities + num_routed(layer);
    float sum = 0.0f;
    for (int32_t a = 0; a < A; a++) sum += probabilities[ids[a]];
    for (int32_t s = 0; s < layer->num_shared; s++) sum += of_shared[s];
    for (int32_t a = 0; a < A; a++) weights[a] = weight_of(layer, probabilities[ids[a]], sum);
    for (int32_t s = 0; s < layer->num_shared; s++) shared[s] = weight_of(layer, of_shared[s], sum);
}

static void route_rows(void *arg, int64_t begin, int64_t end) {
    const route_job *job = arg;
    const colibri_router *layer = job->layer;
    const int64_t E = num_routed(layer), A = layer->num_experts_per_tok, S = layer->num_shared;
    for (int64_t t = begin; t < end; t++) {
        float *p = job->probabilities + t * (E + S), *choice = job->choice + t * E;
        int32_t *ids = job->routing->ids + t * A;
        job->bad[t] = !finite_row(p, E + S);
        if (job->bad[t]) continue;
        score_row(layer->scoring, p, E + S);
        if (!job->routing->given) {
            for (int64_t e = 0; e < E; e++) choice[e] = layer->bias ? p[e] + layer->bias[e] : p[e];
            if (layer->num_groups > 1) keep_groups(layer, choice);
            take_largest(choice, E, (int32_t)A, ids);
        }
        weigh(layer, p, ids, job->routing->weights + t * A, job->routing->shared + t * S);
    }
}

/* Writes the ascending union of n ids below E and returns its length; `used` [E] is scratch. */
static int32_t unite(const int32_t *ids, int64_t n, int64_t E, uint8_t *used, int32_t *out) {
    memset(used, 0, (size_t)E);
    for (int64_t i = 0; i < n; i++) used[ids[i]] = 1;
    int32_t num = 0;
    for (int64_t e = 0; e < E; e++) {
        if (used[e]) out[num++] = (int32_t)e;
    }
    return num;
}

typedef struct {
    float *probabilities, *choice;
    int32_t *bad;
    uint8_t *used;
    input in;
} route_memory;

static route_memory take_route(bump *b, const float *hidden, int64_t rows, int64_t D, int64_t E, float top, int needed) {
    route_memory m = {take_floats(b, rows * E), take_floats(b, rows * E), take(b, rows * 4), take(b, E), {0}};
    m.in = take_input(b, hidden, rows, D, top, needed);
    return m;
}

static int32_t route_step(colibri_context *ctx, const colibri_router *layer, const float *x, colibri_routing *routing) {
    const int64_t rows = routing->rows, E = num_routed(layer), D = layer->gate.columns;
    const colibri_matrix *const gate[1] = {&layer->gate};
    bump b = bump_of(ctx);
    const route_memory m = take_route(&b, routing->hidden, rows, D, layer->gate.rows, top_code(ctx), groups_needed(ctx, gate, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    if (layer->num_experts_per_tok > E || layer->num_groups > MOST_GROUPS || layer->group_top > 16) return COLIBRI_ARGUMENT;
    for (int64_t i = 0; routing->given && i < rows * layer->num_experts_per_tok; i++) {
        ctx->where = (int32_t)(i / layer->num_experts_per_tok);
        if (routing->ids[i] < 0 || routing->ids[i] >= E) return COLIBRI_ARGUMENT;
    }
    if (layer->norm.weight) norm_input(ctx, &m.in, &layer->norm, x, routing->hidden, rows);
    else memcpy(routing->hidden, x, (size_t)(rows * D) * sizeof *x), code_input(ctx, &m.in, rows);
    linear_one(ctx, &layer->gate, &m.in, rows, m.probabilities, STORE);
    route_job job = {layer, routing, m.probabilities, m.choice, m.bad};
    pool_run(ctx->pool, route_rows, &job, rows, 1);
    for (int32_t t = 0; t < rows; t++) {
        if (m.bad[t]) {
            ctx->where = t;
            return COLIBRI_NONFINITE;
        }
    }
    routing->num_used = unite(routing->ids, rows * layer->num_experts_per_tok, E, m.used, routing->experts);
    return COLIBRI_OK;
}

#endif
