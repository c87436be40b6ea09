/* The experts of one layer, in whatever order they land. */
#ifndef COLIBRI_KERN_MOE_H
#define COLIBRI_KERN_MOE_H

#include "futex.h"
#include "kern_dense.h"

enum { FEW_ROWS = 256 /* (token, expert) rows up to which each keeps its output until all are there */ };
enum { SLOT_IS_LOADING = 1, SLOT_IS_READY = 2, MOST_WAITED = 64 /* slots slept on at once */ };

static const int64_t WAIT_NS = 100000000;  /* then Python gets a chance to see Ctrl-C */
static const int64_t SPIN_WAIT_NS = 20000;
static const int64_t SLEEP_NS = 2000000;   /* a landing that wakes nobody is still seen */

/* Rows of the step, expert by expert: which token, and with what weight. */
typedef struct {
    int32_t *starts;  /* [n + 1] first row of each expert */
    int32_t *tokens;  /* [num rows] ascending within an expert */
    float *weights;   /* [num rows] */
    int32_t *index;   /* [E] place of an expert in the call's list, or -1 */
    uint8_t *done;    /* [n] */
    glu *nets;        /* [n] */
    float *units, *out; /* outputs of [capacity] rows */
    input in, hidden;
} moe_memory;

static moe_memory take_moe(bump *b, const float *x, int64_t rows, int64_t A, int64_t E, int64_t n, int64_t D, int64_t F, float top, int needed_in,
                           int needed_down) {
    const int64_t few = rows * A < FEW_ROWS ? rows * A : FEW_ROWS, capacity = few > rows ? few : rows;
    moe_memory m = {0};
    m.starts = take(b, (n + 1) * 4);
    m.tokens = take(b, rows * A * 4);
    m.weights = take_floats(b, rows * A);
    m.index = take(b, E * 4);
    m.done = take(b, n);
    m.nets = take(b, n * (int64_t)sizeof(glu));
    m.units = take_floats(b, capacity * F);
    m.out = take_floats(b, capacity * D);
    m.in = take_input(b, x, rows, D, top, needed_in);
    m.hidden = take_input(b, m.units, capacity, F, top, needed_down);
    return m;
}

/* One call of moe_step. */
typedef struct {
    colibri_context *ctx;
    const colibri_experts *layer;
    const colibri_routing *routing;
    const colibri_slots *table;
    const int32_t *slots;
    int64_t n;
    moe_memory *m;
    float *y;
    int64_t first, last; /* rows that add_rows adds, kept from `first` on */
} moe_job;

static int32_t state_of(const moe_job *job, int64_t i) { return __atomic_load_n(&job->table->states[job->slots[i]], __ATOMIC_ACQUIRE); }

/* Sorts the step's (token, expert) rows by expert; returns 0 where an id is out of range. */
static int list_rows(const moe_job *job, const int32_t *experts) {
    const colibri_routing *r = job->routing;
    const moe_memory *m = job->m;
    const int64_t num = (int64_t)r->rows * r->num_experts_per_tok;
    for (int64_t e = 0; e < r->num_experts; e++) m->index[e] = -1;
    memset(m->starts, 0, (size_t)(job->n + 1) * sizeof *m->starts);
    for (int64_t i = 0; i < job->n; i++) {
        if (experts[i] < 0 || experts[i] >= r->num_experts || (i && experts[i] <= experts[i - 1])) return 0;
        m->index[experts[i]] = (int32_t)i;
    }
    for (int64_t j = 0; j < num; j++) {
        if (r->ids[j] < 0 || r->ids[j] >= r->num_experts) return 0;
        if (m->index[r->ids[j]] >= 0) m->starts[m->index[r->ids[j]] + 1]++;
    }
    for (int64_t i = 0; i < job->n; i++) m->starts[i + 1] += m->starts[i];
    for (int64_t j = 0; j < num; j++) { /* starts[i] runs up to where expert i + 1 starts … */
        const int32_t i = m->index[r->ids[j]];
        if (i < 0) continue;
        const int32_t row = m->starts[i]++;
        m->tokens[row] = (int32_t)(j / r->num_experts_per_tok);
        m->weights[row] = r->weights[j];
    }
    for (int64_t i = job->n; i > 0; i--) m->starts[i] = m->starts[i - 1]; /* … and is moved back */
    m->starts[0] = 0;
    return 1;
}

/* The network in slot i; its outputs are kept from `row` on. */
static glu net_of(const moe_job *job, int64_t i, int64_t row) {
    const int64_t *part = job->table->parts + 3 * (int64_t)job->slots[i];
    const moe_memory *m = job->m;
    const colibri_experts *layer = job->layer;
    glu net = {layer->gate_proj, layer->up_proj, layer->down_proj, layer->act, m->tokens + m->starts[i], m->starts[i + 1] - m->starts[i], row};
    colibri_matrix *const matrices[3] = {&net.gate, &net.up, &net.down};
    for (int j = 0; j < 3; j++) {
        matrices[j]->data = job->table->arena + part[j];
        if (!job->table->biases) continue;
        matrices[j]->bias = (const float *)(const void *)(job->table->arena + job->table->biases[3 * (int64_t)job->slots[i] + j]);
    }
    return net;
}

/* The first i whose slot does not hold a whole expert, or -1. */
static int64_t bad_slot(const moe_job *job) {
    const colibri_matrix *const parts[3] = {&job->layer->gate_proj, &job->layer->up_proj, &job->layer->down_proj};
    for (int64_t i = 0; i < job->n; i++) {
        if (job->slots[i] < 0 || job->slots[i] >= job->table->num_slots) return i;
        for (int j = 0; j < 3; j++) {
            const int64_t offset = job->table->parts[3 * (int64_t)job->slots[i] + j];
            if (offset < 0 || offset + matrix_nbytes(parts[j]) > job->table->arena_nbytes) return i;
            if (!job->table->biases) continue;
            const int64_t bias = job->table->biases[3 * (int64_t)job->slots[i] + j];
            if (bias < 0 || bias % 4 || bias + 4ll * parts[j]->rows > job->table->arena_nbytes) return i;
        }
    }
    return -1;
}

/* y += w d by ascending expert, columns [begin, end). */
static void add_rows(void *arg, int64_t begin, int64_t end) {
    const moe_job *job = arg;
    const int64_t D = job->layer->down_proj.rows;
    for (int64_t row = job->first; row < job->last; row++) {
        const float weight = job->m->weights[row], *d = job->m->out + (row - job->first) * D;
        float *y = job->y + job->m->tokens[row] * D;
        for (int64_t k = begin; k < end; k++) y[k] = __builtin_fmaf(weight, d[k], y[k]);
    }
}

static void add_outputs(moe_job *job, int64_t first, int64_t last) {
    job->first = first, job->last = last;
    pool_run(job->ctx->pool, add_rows, job, job->layer->down_proj.rows, 512);
}

static void run_nets(const moe_job *job, int64_t n) {
    run_glu(job->ctx, job->m->nets, n, &job->m->in, &job->m->hidden, job->m->units, job->m->out);
}

/* Whether one of the slots in `waiting` is no longer LOADING. */
static int any_landed(const moe_job *job, const int32_t *waiting, int n) {
    for (int i = 0; i < n; i++) {
        if (state_of(job, waiting[i]) != SLOT_IS_LOADING) return 1;
    }
    return 0;
}

/* Waits until one of the slots in `waiting` lands: spins for 20 us, then sleeps on all of them. Returns 0 at `end`. */
static int wait_until_landed(const moe_job *job, const int32_t *waiting, int n, int64_t end) {
    const int64_t spin_end = now_ns() + SPIN_WAIT_NS;
    const void *words[MOST_WAITED];
    pool_rest(job->ctx->pool);
    while (now_ns() < spin_end) {
        for (int pause = 0; pause < 32; pause++) cpu_pause();
        if (any_landed(job, waiting, n)) return 1;
    }
    for (int i = 0; i < n; i++) words[i] = &job->table->states[job->slots[waiting[i]]];
    futex_wait_any(words, n, SLOT_IS_LOADING, SLEEP_NS);
    return now_ns() < end;
}

static int wait_for(const moe_job *job, colibri_progress *progress, const int32_t *waiting, int n, int64_t end) {
    if (progress->num_waits >= progress->most_waits) return wait_until_landed(job, waiting, n, end);
    int64_t *span = progress->waits + 2 * progress->num_waits++;
    span[0] = now_ns();
    const int in_time = wait_until_landed(job, waiting, n, end);
    span[1] = now_ns();
    return in_time;
}

/* FAILED where a slot that is not done will never be READY. */
static int32_t check_slot(const moe_job *job, int64_t i, int32_t state) {
    if (state == SLOT_IS_READY || state == SLOT_IS_LOADING) return COLIBRI_OK;
    job->ctx->where = job->slots[i];
    return COLIBRI_FAILED;
}

/* Few rows: computes what is READY, in any order; adds when all are there. */
static int32_t run_any_order(moe_job *job, colibri_progress *progress, int64_t end) {
    const moe_memory *m = job->m;
    while (progress->finished < job->n) {
        int64_t num = 0;
        int32_t waiting[MOST_WAITED];
        int num_waiting = 0;
        for (int64_t i = 0; i < job->n; i++) {
            if (m->done[i]) continue;
            const int32_t state = state_of(job, i), code = check_slot(job, i, state);
            if (code != COLIBRI_OK) return code;
            if (state == SLOT_IS_READY) m->nets[num++] = net_of(job, i, m->starts[i]), m->done[i] = 1;
            else if (num_waiting < MOST_WAITED) waiting[num_waiting++] = (int32_t)i;
        }
        run_nets(job, num);
        progress->finished += (int32_t)num;
        if (num == 0 && !wait_for(job, progress, waiting, num_waiting, end)) return COLIBRI_AGAIN;
    }
    add_outputs(job, 0, m->starts[job->n]);
    return COLIBRI_OK;
}

/* Many rows: one expert after the other, ascending, waiting for each. */
static int32_t run_ascending(moe_job *job, colibri_progress *progress, int64_t end) {
    const moe_memory *m = job->m;
    while (progress->finished < job->n) {
        const int64_t i = progress->finished;
        const int32_t state = state_of(job, i), code = check_slot(job, i, state);
        if (code != COLIBRI_OK) return code;
        if (state == SLOT_IS_LOADING) {
            const int32_t waiting[1] = {(int32_t)i};
            if (!wait_for(job, progress, waiting, 1, end)) return COLIBRI_AGAIN;
            continue;
        }
        m->nets[0] = net_of(job, i, 0);
        run_nets(job, 1);
        add_outputs(job, m->starts[i], m->starts[i + 1]);
        progress->finished++;
    }
    return COLIBRI_OK;
}

static int32_t moe_step(colibri_context *ctx, const colibri_experts *layer, const colibri_routing *routing, const int32_t *experts,
                        const int32_t *slots, int32_t n, const colibri_slots *table, colibri_progress *progress, float *y) {
    const int64_t D = layer->down_proj.rows, F = layer->gate_proj.rows, rows = routing->rows;
    const colibri_matrix *const first[2] = {&layer->gate_proj, &layer->up_proj}, *const second[1] = {&layer->down_proj};
    bump b = bump_of(ctx);
    moe_memory m = take_moe(&b, routing->hidden, rows, routing->num_experts_per_tok, routing->num_experts, n, D, F, top_code(ctx),
                            groups_needed(ctx, first, 2), groups_needed(ctx, second, 1));
    if (!fits(&b)) return COLIBRI_WORKSPACE;
    moe_job job = {.ctx = ctx, .layer = layer, .routing = routing, .table = table, .slots = slots, .n = n, .m = &m, .y = y};
    if (!progress->started) {
        ctx->where = (int32_t)bad_slot(&job);
        if (ctx->where >= 0 || !list_rows(&job, experts)) return COLIBRI_ARGUMENT;
        memset(m.done, 0, (size_t)n);
        code_input(ctx, &m.in, rows);
        progress->started = 1;
    }
    const int64_t end = now_ns() + WAIT_NS;
    return m.starts[n] <= FEW_ROWS ? run_any_order(&job, progress, end) : run_ascending(&job, progress, end);
}

typedef struct {
    const colibri_experts *layer;
    float *y, *x;
    const float *shared, *gate; /* [rows, D], [rows]; NULL: none */
} finish_job;

static void finish_rows(void *arg, int64_t begin, int64_t end) {
    const finish_job *job = arg;
    const int64_t D = job->layer->down_proj.rows;
    for (int64_t t = begin; t < end; t++) {
        const float weight = job->gate ? sigmoid(job->gate[t]) : 1.0f;
        float *y = job->y + t * D, *x = job->x + t * D;
        for (int64_t k = 0; job->shared && k < D; k++) y[k] = __builtin_fmaf(weight, job->shared[t * D + k], y[k]);
        for (int64_t k = 0; k < D; k++) x[k] += y[k];
    }
}

static int32_t moe_finish(colibri_context *ctx, const colibri_experts *layer, const colibri_routing *routing, float *y, float *x) {
    finish_job job = {layer, y, x, NULL, NULL};
    bump b = bump_of(ctx);
    const int32_t rows = routing->rows;
    if (layer->shared.down_proj.rows) {
        ffn_memory memory;
        const int32_t code = run_ffn(ctx, &layer->shared, routing->hidden, rows, &b, &memory);
        if (code != COLIBRI_OK) return code;
        job.shared = memory.out;
    }
    if (layer->shared_gate.rows) {
        const colibri_matrix *const gate[1] = {&layer->shared_gate};
        float *logits = take_floats(&b, rows);
        const input in = take_input(&b, routing->hidden, rows, layer->shared_gate.columns, top_code(ctx), groups_needed(ctx, gate, 1));
        if (!fits(&b)) return COLIBRI_WORKSPACE;
        code_input(ctx, &in, rows);
        linear_one(ctx, &layer->shared_gate, &in, rows, logits, STORE);
        job.gate = logits;
    }
    pool_run(ctx->pool, finish_rows, &job, rows, 1);
    return COLIBRI_OK;
}

#endif
