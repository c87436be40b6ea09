/* Matrices times rows of tokens: the workspace, the coding of inputs, and panels handed to threads. */
#ifndef COLIBRI_KERN_LINEAR_H
#define COLIBRI_KERN_LINEAR_H

#include <stddef.h>

#include "colibri.h"
#include "kern_blocks.h"
#include "kern_fp8.h"
#include "pool.h"

enum { MOST_PANELS = 8 /* handed out at once: 64 rows */, LARGEST_GROUP = 128, MOST_MATRICES = 8 /* over one input at once */, TOKENS = 8 /* that meet a panel at once */ };

/* A step's memory: bumped within the caller's workspace, or (base NULL) only counted. */
typedef struct {
    uint8_t *base;
    int64_t used, nbytes;
} bump;

static bump bump_of(const colibri_context *ctx) { return (bump){ctx->workspace, 0, ctx->workspace_nbytes}; }

static int fits(const bump *b) { return b->base && b->used <= b->nbytes; }

static void *take(bump *b, int64_t nbytes) {
    uint8_t *p = b->base ? b->base + b->used : NULL;
    b->used += (nbytes + 63) / 64 * 64;
    return b->used <= b->nbytes ? p : NULL;
}

static float *take_floats(bump *b, int64_t n) { return take(b, n * 4); }

/* The rows that matrices multiply: floats, and codes for each group size that some matrix needs. */
typedef struct {
    const float *x;
    int64_t width; /* K, and the distance between rows */
    float top;     /* largest code: 32767, 127, or 0 for float activations */
    coded by_group[3];
} input;

static float top_code(const colibri_context *ctx) {
    return ctx->activations == COLIBRI_INT16 ? 32767.0f : ctx->activations == COLIBRI_INT8 ? 127.0f : 0.0f;
}

enum { HALVES = 8 /* bit beside those of groups: sums of half groups of 32 */, ALL_GROUPS = 15 };

/* Which codes the matrices need: bit i stands for groups of 32 << i. */
static int groups_needed(const colibri_context *ctx, const colibri_matrix *const *matrices, int n) {
    int needed = 0;
    for (int i = 0; i < n; i++) {
        if (ctx->activations == COLIBRI_FLOAT32 || !is_coded(matrices[i]->format)) continue;
        needed |= 1 << (matrices[i]->format & 15) | (has_halves(matrices[i]->format) ? HALVES : 0);
    }
    return needed;
}

static input take_input(bump *b, const float *x, int64_t rows, int64_t width, float top, int needed) {
    input in = {.x = x, .width = width, .top = top};
    for (int i = 0; i < 3; i++) {
        if (!(needed >> i & 1)) continue;
        const int64_t group = 32ll << i, groups = (width + group - 1) / group;
        in.by_group[i] = (coded){take(b, rows * groups * group * 2), take(b, rows * groups * 4), take(b, rows * groups * 4), groups, top > 127.0f, NULL};
        if (i == 0 && needed & HALVES) in.by_group[i].halves = take(b, rows * groups * 8);
    }
    return in;
}

/* Codes columns [first, last) of a row; both are multiples of every group in use, or the row's end. */
static void code_columns(const input *in, int64_t row, int64_t first, int64_t last) {
    for (int i = 0; i < 3; i++) {
        const int64_t group = 32ll << i;
        if (in->by_group[i].codes) {
            code_row(&in->by_group[i], row, in->x + row * in->width, in->width, group, in->top, first / group, (last + group - 1) / group);
        }
    }
}

typedef struct {
    const input *in;
    const float *x;          /* NULL: in->x is already there and is only coded */
    const colibri_norm *norm;
    float *out;
} prepare_job;

static void prepare_rows(void *arg, int64_t begin, int64_t end) {
    const prepare_job *job = arg;
    const int64_t width = job->in->width;
    for (int64_t t = begin; t < end; t++) {
        if (job->x) rms_norm(job->x + t * width, job->norm->weight, job->norm->eps, width, job->out + t * width);
        code_columns(job->in, t, 0, width);
    }
}

/* Codes all rows of an input. */
static void code_input(colibri_context *ctx, const input *in, int64_t rows) {
    prepare_job job = {.in = in};
    pool_run(ctx->pool, prepare_rows, &job, rows, 1);
}

/* out = norm(x), which is what `in` reads, and codes it. */
static void norm_input(colibri_context *ctx, const input *in, const colibri_norm *norm, const float *x, float *out, int64_t rows) {
    prepare_job job = {in, x, norm, out};
    pool_run(ctx->pool, prepare_rows, &job, rows, 1);
}

static inline int64_t panels_of(const colibri_matrix *m) { return (m->rows + PANEL - 1) / PANEL; }

/* Panels handed out at once, in pairs. Where several tokens pass over a chunk of floats, it should stay in the L1 cache. */
static int64_t panel_grain(const colibri_context *ctx, const colibri_matrix *m, int64_t panels, int64_t tokens) {
    if (!is_coded(m->format) && tokens > TOKENS) return 1;
    const int64_t grain = panels / (pool_threads(ctx->pool) * 16) / 2 * 2;
    return grain < 2 ? 2 : grain > MOST_PANELS ? MOST_PANELS : grain;
}

static inline int rows_in_panel(const colibri_matrix *m, int64_t p) {
    const int64_t left = m->rows - p * PANEL;
    return left < PANEL ? (int)left : PANEL;
}

static void add_bias(const colibri_matrix *m, int64_t p, int n, float (*out)[8]) {
    const int rows = m->bias ? rows_in_panel(m, p) : 0;
    for (int i = 0; i < n && rows; i++) {
        for (int r = 0; r < rows; r++) out[i][r] += m->bias[p * PANEL + r];
    }
}

static void float_panel(const colibri_matrix *m, int64_t p, const input *in, const int64_t *tokens, int n, float (*out)[8]) {
    const uint8_t *panel = m->data + p * m->panel_stride;
    const float *x[TOKENS];
    for (int i = 0; i < n; i++) x[i] = in->x + tokens[i] * in->width;
    if (is_fp8(m->format)) {
        fp8_rows(m->data, m->rows, m->columns, fp8_block(m->format), p * PANEL, rows_in_panel(m, p), x, n, out[0], PANEL);
    } else {
        float_rows(m->format, panel, (int64_t)m->columns * item_size(m->format), rows_in_panel(m, p), x, n, m->columns, out[0], PANEL);
    }
}

/* out[n][8]: the eight rows (or what is left of the matrix) of panel p times n <= TOKENS inputs; tokens[n] are their rows. */
static void panel_times(const colibri_matrix *m, int64_t p, const input *in, const int64_t *tokens, int n, float (*out)[8]) {
    const uint8_t *panel = m->data + p * m->panel_stride;
    if (!is_coded(m->format)) {
        float_panel(m, p, in, tokens, n, out);
    } else if (in->top == 0.0f) {
        for (int i = 0; i < n; i++) any_panel_float(m->format, panel, in->x + tokens[i] * in->width, m->columns, out[i]);
    } else {
        any_panel(m->format, panel, &in->by_group[m->format & 15], tokens, n, out);
    }
    add_bias(m, p, n, out);
}

/* Panel p of a and panel q of b, which are alike: for several inputs, one pass over both. */
static void panel_pair_times(const colibri_matrix *a, int64_t p, const colibri_matrix *b, int64_t q, const input *in, const int64_t *tokens,
                             int n, float (*const out[2])[8]) {
    if (!is_coded(a->format) || a->format != b->format || in->top == 0.0f) {
        panel_times(a, p, in, tokens, n, out[0]);
        panel_times(b, q, in, tokens, n, out[1]);
        return;
    }
    const uint8_t *const panels[2] = {a->data + p * a->panel_stride, b->data + q * b->panel_stride};
    any_panel_pair(a->format, panels, &in->by_group[a->format & 15], tokens, n, out);
    add_bias(a, p, n, out[0]);
    add_bias(b, q, n, out[1]);
}

/* Fills list[TOKENS] with the next tokens from `from` on and returns how many; `tokens` NULL means token = position. */
static int next_tokens(const int32_t *tokens, int64_t from, int64_t num, int64_t *list) {
    int n = 0;
    for (; n < TOKENS && from + n < num; n++) list[n] = tokens ? tokens[from + n] : from + n;
    return n;
}

enum { STORE, ADD };

/* Several matrices over one input: the panels of all of them are one loop. */
typedef struct {
    const input *in;
    int64_t rows;
    int num_matrices, add;
    const colibri_matrix *matrices[MOST_MATRICES];
    float *out[MOST_MATRICES]; /* [rows, matrix rows] */
} linear_job;

static void put_panel(const colibri_matrix *m, int64_t p, const int64_t *tokens, int n, int add, float (*y)[8], float *out) {
    const int rows = rows_in_panel(m, p);
    for (int i = 0; i < n; i++) {
        float *to = out + tokens[i] * m->rows + p * PANEL;
        for (int r = 0; r < rows; r++) to[r] = add ? to[r] + y[i][r] : y[i][r];
    }
}

/* Panels [first, last) of m times up to TOKENS rows of the input. */
static void matrix_panels(const colibri_matrix *m, int64_t first, int64_t last, const input *in, const int64_t *tokens, int n, int add,
                          float *out) {
    float y[2][TOKENS][8];
    float(*const both[2])[8] = {y[0], y[1]};
    int64_t p = first;
    for (; p + 2 <= last; p += 2) {
        panel_pair_times(m, p, m, p + 1, in, tokens, n, both);
        for (int i = 0; i < 2; i++) put_panel(m, p + i, tokens, n, add, y[i], out);
    }
    if (p < last) {
        panel_times(m, p, in, tokens, n, y[0]);
        put_panel(m, p, tokens, n, add, y[0], out);
    }
}

static void linear_panels(void *arg, int64_t begin, int64_t end) {
    const linear_job *job = arg;
    int64_t tokens[TOKENS];
    for (int64_t t = 0; t < job->rows; t += TOKENS) {
        const int n = next_tokens(NULL, t, job->rows, tokens);
        int64_t first = 0;
        for (int i = 0; i < job->num_matrices; i++) {
            const colibri_matrix *m = job->matrices[i];
            const int64_t last = first + panels_of(m), from = begin > first ? begin : first, to = end < last ? end : last;
            if (from < to) matrix_panels(m, from - first, to - first, job->in, tokens, n, job->add, job->out[i]);
            first = last;
        }
    }
}

static void linear(colibri_context *ctx, linear_job *job) {
    int64_t panels = 0;
    for (int i = 0; i < job->num_matrices; i++) panels += panels_of(job->matrices[i]);
    pool_run(ctx->pool, linear_panels, job, panels, panel_grain(ctx, job->matrices[0], panels, job->rows));
}

/* out = m x, or with `add` out += m x. */
static void linear_one(colibri_context *ctx, const colibri_matrix *m, const input *in, int64_t rows, float *out, int add) {
    linear_job job = {in, rows, 1, add, {m}, {out}};
    linear(ctx, &job);
}

/* Resident bytes of a matrix whose panels are panel_stride apart. */
static int64_t matrix_nbytes(const colibri_matrix *m) {
    const int64_t panels = panels_of(m), K = m->columns;
    if (panels == 0) return 0;
    if (is_fp8(m->format)) return fp8_nbytes(m->rows, K, fp8_block(m->format));
    if (!is_coded(m->format)) return (panels - 1) * m->panel_stride + (m->rows - (panels - 1) * PANEL) * K * item_size(m->format);
    if (is_blocks(m->format)) return (panels - 1) * m->panel_stride + blocks_panel_nbytes(m->format, K);
    const int kind = coded_kind(m->format);
    const int64_t group = coded_group(m->format), groups = (K + group - 1) / group;
    return (panels - 1) * m->panel_stride + groups * PANEL * (scale_nbytes(kind) + group / (kind == INT8_CODE ? 1 : 2));
}

#endif
