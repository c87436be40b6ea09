/* Packing of blocks as GGUF files have them. */
#ifndef COLIBRI_PACK_BLOCKS_H
#define COLIBRI_PACK_BLOCKS_H

#include "colibri.h"

/* Rows of blocks of ggml's type `number`, from `from` on, in the resident format of that type. */
void pack_blocks(const colibri_packing *p, int64_t number, const uint8_t *from, uint8_t *out);

#endif
