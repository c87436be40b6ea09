/* What one instruction set's build of kern.c exports. */
#ifndef COLIBRI_KERN_TABLE_H
#define COLIBRI_KERN_TABLE_H

#include "colibri.h"

struct colibri_table {
    int64_t (*workspace_nbytes)(const colibri_limits *);
    int32_t (*embed)(colibri_context *, const colibri_matrix *, const int32_t *, int32_t, float *);
    int32_t (*matmul)(colibri_context *, const colibri_matrix *, const float *, int32_t, float *);
    int32_t (*attention_step)(colibri_context *, const colibri_attention *, const float *, const colibri_batch *, const colibri_kv *, float *);
    int32_t (*attend)(colibri_context *, const colibri_attention *, const colibri_heads *, const colibri_batch *, const colibri_kv *, float *);
    int32_t (*latent_step)(colibri_context *, const colibri_latent *, const float *, const colibri_batch *, const colibri_latent_state *, float *);
    int32_t (*ffn_step)(colibri_context *, const colibri_ffn *, const float *, int32_t, float *);
    int32_t (*route_step)(colibri_context *, const colibri_router *, const float *, colibri_routing *);
    int32_t (*moe_step)(colibri_context *, const colibri_experts *, const colibri_routing *, const int32_t *, const int32_t *, int32_t,
                        const colibri_slots *, colibri_progress *, float *);
    int32_t (*moe_finish)(colibri_context *, const colibri_experts *, const colibri_routing *, float *, float *);
    int32_t (*head_step)(colibri_context *, const colibri_norm *, const colibri_matrix *, const float *, int32_t, float *);
    void (*exp)(const float *, float *, int64_t);
    uint64_t (*read_sum)(colibri_context *, const uint8_t *, int64_t);
    int32_t (*project)(colibri_context *, const colibri_norm *, const colibri_matrix *const *, int32_t, const float *, int32_t, float *const *);
    int32_t (*norm_rows)(colibri_context *, const colibri_group_norm *, const float *, int64_t, const float *, int64_t, int32_t, int32_t, float *);
    int32_t (*activate)(colibri_context *, int32_t, const float *, int64_t, int32_t, int32_t, float *);
    int32_t (*decay_rows)(colibri_context *, const colibri_decay *, const float *, int64_t, int32_t, float *);
    int32_t (*conv_rows)(colibri_context *, const colibri_short_conv *, const colibri_cell_layer *, const colibri_cell_rows *, float *, int64_t);
    int32_t (*delta_rows)(colibri_context *, const colibri_delta_rule *, const colibri_cell_layer *, const colibri_cell_rows *, const float *,
                          int64_t, const float *, int64_t, const float *, int64_t, const float *, int64_t, const float *, int64_t, float *);
    int32_t (*pool_rows)(colibri_context *, const colibri_pooling *, const colibri_cell_layer *, const colibri_cell_rows *, const colibri_batch *,
                         const colibri_plane *, float *, const float *);
    int32_t (*select_entries)(colibri_context *, const colibri_entry_indexer *, const colibri_batch *, const colibri_plane *, float *,
                              const float *, int32_t *);
    int32_t (*shared_key_rows)(colibri_context *, const colibri_shared_key *, const colibri_batch *, const colibri_shared_key_state *, float *,
                               float *);
    int32_t (*matmul_groups)(colibri_context *, const colibri_matrix *, int32_t, const float *, int32_t, float *);
    int32_t (*read_streams)(colibri_context *, const colibri_stream_mix *, const float *, int32_t, float *, float *);
    int32_t (*write_streams)(colibri_context *, const colibri_stream_mix *, const float *, const float *, int32_t, int32_t, float *);
    int32_t (*read_gated)(colibri_context *, const float *, const float *, int32_t, int32_t, int32_t, float *);
    int32_t (*write_gated)(colibri_context *, const float *, const float *, int32_t, int32_t, int32_t, float *);
    int32_t (*match_streams)(colibri_context *, const float *, const float *, int32_t, int32_t, int32_t, float *);
    int32_t (*encode)(const colibri_packing *, const uint8_t *const *, uint8_t *);
};

/* That of the best instruction set that runs here. */
const colibri_table *colibri_best_table(void);

#define TABLE_NAME_OF(isa) colibri_table_##isa
#define TABLE_NAME(isa) TABLE_NAME_OF(isa)

#endif
