/* The public face of the library: what cffi compiles against. */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stdint.h>

#include "abi_kernels.cdef"
#include "abi_recurrent.cdef"
#include "abi_gated.cdef"
#include "abi_latent.cdef"
#include "abi_pack.cdef"
#include "abi_shared_key.cdef"
#if __has_include("abi_reader.cdef")
#include "abi_reader.cdef"
#endif

#endif
