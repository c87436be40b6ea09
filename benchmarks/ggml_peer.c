/* The peer that `coli bench kernels --peer` times: ggml's repacked Q4_0, driven through its public API.

   Many distinct matrices [rows, columns], more than a cache holds, lie in the buffer type that llama.cpp itself would
   choose for them. A graph multiplies some of them, one after another, with inputs [n, columns] in float32; so ggml
   codes the inputs of each matrix, as it does when it runs a model. README.md beside this file says how to build it.

   The functions return NULL or a code below 0 on failure. One thread at a time. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#define EXPORT __attribute__((visibility("default")))

enum { PEER_VERSION = 1 };

typedef struct {
    struct ggml_context *context;
    struct ggml_cgraph *graph;
    struct ggml_tensor *last;
} round_graph;

typedef struct {
    ggml_backend_t backend;
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor **weights;
    round_graph *graphs;
    ggml_backend_buffer_t rows_buffer; /* one input and one output: every graph, every matrix uses them */
    uint8_t *base; /* Q4_0, before it was repacked */
    int rows, columns, count, num_graphs;
} peer;

/* The buffer type in which the CPU backend interleaves rows; NULL where this build has none. */
static ggml_backend_buffer_type_t repacking_type(ggml_backend_dev_t device) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    ggml_backend_dev_get_extra_bufts_t types =
        (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts");
    if (types == NULL) return NULL;
    for (ggml_backend_buffer_type_t *type = types(device); type != NULL && *type != NULL; type++)
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) return *type;
    return NULL;
}

static struct ggml_context *tensors_of(size_t count) {
    struct ggml_init_params params = {ggml_tensor_overhead() * count + ggml_graph_overhead_custom(count, false), NULL, true};
    return ggml_init(params);
}

/* Sums of uniform numbers, near enough to a normal distribution; the same on every machine. */
static void draw(float *out, int64_t count, float deviation) {
    uint64_t state = 0x9E3779B97F4A7C15u;
    for (int64_t i = 0; i < count; i++) {
        float sum = 0;
        for (int term = 0; term < 3; term++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(state >> 40) / 16777216.0f - 0.5f;
        }
        out[i] = 2 * deviation * sum;
    }
}

static bool fill(peer *p) {
    int64_t values = (int64_t)p->rows * p->columns;
    size_t row = ggml_row_size(GGML_TYPE_Q4_0, p->columns), size = row * (size_t)p->rows;
    float *drawn = malloc((size_t)values * sizeof *drawn);
    uint8_t *turned = malloc(size);
    p->base = malloc(size);
    bool ready = drawn != NULL && turned != NULL && p->base != NULL;
    if (ready) {
        draw(drawn, values, 1 / sqrtf((float)p->columns));
        ggml_quantize_chunk(GGML_TYPE_Q4_0, drawn, p->base, 0, p->rows, p->columns, NULL);
        for (int i = 0; i < p->count; i++) { /* matrix i is the base, its rows turned by i */
            size_t by = (size_t)(i % p->rows) * row;
            memcpy(turned, p->base + by, size - by);
            memcpy(turned + size - by, p->base, by);
            ggml_backend_tensor_set(p->weights[i], turned, 0, size);
        }
    }
    free(drawn);
    free(turned);
    return ready;
}

static void close_graphs(peer *p) {
    for (int i = 0; i < p->num_graphs; i++)
        if (p->graphs[i].context != NULL) ggml_free(p->graphs[i].context);
    if (p->rows_buffer != NULL) ggml_backend_buffer_free(p->rows_buffer);
    p->rows_buffer = NULL;
    free(p->graphs);
    p->graphs = NULL;
    p->num_graphs = 0;
}

EXPORT int peer_version(void) { return PEER_VERSION; }

EXPORT void peer_close(peer *p) {
    if (p == NULL) return;
    close_graphs(p);
    if (p->buffer != NULL) ggml_backend_buffer_free(p->buffer);
    if (p->context != NULL) ggml_free(p->context);
    if (p->backend != NULL) ggml_backend_free(p->backend);
    free(p->weights);
    free(p->base);
    free(p);
}

static void say_nothing(enum ggml_log_level level, const char *text, void *data) {
    (void)level, (void)text, (void)data;
}

/* `count` distinct matrices. */
EXPORT peer *peer_open(int rows, int columns, int count, int threads) {
    peer *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    ggml_log_set(say_nothing, NULL); /* it tells of every matrix */
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_buffer_type_t type = device == NULL ? NULL : repacking_type(device);
    p->rows = rows, p->columns = columns, p->count = count;
    p->backend = type == NULL ? NULL : ggml_backend_dev_init(device, NULL);
    p->context = tensors_of((size_t)count + 1);
    p->weights = calloc((size_t)count, sizeof *p->weights);
    if (p->backend == NULL || p->context == NULL || p->weights == NULL) goto failed;
    ggml_backend_cpu_set_n_threads(p->backend, threads);
    for (int i = 0; i < count; i++) p->weights[i] = ggml_new_tensor_2d(p->context, GGML_TYPE_Q4_0, columns, rows);
    p->buffer = ggml_backend_alloc_ctx_tensors_from_buft(p->context, type);
    if (p->buffer == NULL || !fill(p)) goto failed;
    return p;
failed:
    peer_close(p);
    return NULL;
}

/* Room for one input and one output of `n` rows; returns where the output starts. */
static char *alloc_rows(peer *p, int n, const float *input) {
    size_t align = ggml_backend_get_alignment(p->backend);
    size_t in = sizeof(float) * (size_t)n * (size_t)p->columns, out = sizeof(float) * (size_t)n * (size_t)p->rows;
    size_t start = (in + align - 1) / align * align;
    p->rows_buffer = ggml_backend_alloc_buffer(p->backend, start + out + align);
    if (p->rows_buffer == NULL) return NULL;
    char *memory = ggml_backend_buffer_get_base(p->rows_buffer);
    memcpy(memory, input, in);
    memset(memory + start, 0, out);
    return memory + start;
}

static bool build(peer *p, round_graph *g, int begin, int end, int n, char *output) {
    size_t nodes = 2 * (size_t)(end - begin) + 8;
    g->context = tensors_of(nodes);
    if (g->context == NULL) return false;
    g->graph = ggml_new_graph_custom(g->context, nodes, false);
    struct ggml_tensor *input = ggml_new_tensor_2d(g->context, GGML_TYPE_F32, p->columns, n);
    ggml_backend_tensor_alloc(p->rows_buffer, input, ggml_backend_buffer_get_base(p->rows_buffer));
    for (int i = begin; i < end; i++) {
        g->last = ggml_mul_mat(g->context, p->weights[i], input);
        ggml_backend_tensor_alloc(p->rows_buffer, g->last, output);
        if (!ggml_backend_supports_op(p->backend, g->last)) return false;
        ggml_build_forward_expand(g->graph, g->last);
    }
    return true;
}

/* Graphs of up to `each` matrices for inputs [n, columns]; earlier ones go. Returns how many there are. */
EXPORT int peer_prepare(peer *p, int n, int each, const float *input) {
    close_graphs(p);
    int wanted = (p->count + each - 1) / each;
    p->graphs = calloc((size_t)wanted, sizeof *p->graphs);
    char *output = p->graphs == NULL ? NULL : alloc_rows(p, n, input);
    if (output == NULL) return -1;
    while (p->num_graphs < wanted) {
        round_graph *g = &p->graphs[p->num_graphs];
        int begin = p->num_graphs++ * each, end = begin + each < p->count ? begin + each : p->count;
        if (!build(p, g, begin, end, n, output)) return -1;
    }
    return p->num_graphs;
}

/* Computes one graph; returns how many matrices it multiplied. */
EXPORT int peer_run(peer *p, int graph, int each) {
    if (graph < 0 || graph >= p->num_graphs) return -1;
    if (ggml_backend_graph_compute(p->backend, p->graphs[graph].graph) != GGML_STATUS_SUCCESS) return -1;
    int left = p->count - graph * each;
    return left < each ? left : each;
}

/* What the last matrix of a graph gave, [n, rows]. */
EXPORT void peer_output(peer *p, int graph, float *out) {
    ggml_backend_tensor_get(p->graphs[graph].last, out, 0, ggml_nbytes(p->graphs[graph].last));
}

/* The numbers that matrix 0 stands for, [rows, columns]. */
EXPORT void peer_weights(peer *p, float *out) {
    ggml_get_type_traits(GGML_TYPE_Q4_0)->to_float(p->base, out, (int64_t)p->rows * p->columns);
}
