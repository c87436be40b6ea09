"""Run under counting.c: prints what the library asks for while tokens are computed."""

import ctypes
import sys
from pathlib import Path

import numpy as np

from colibri import _native
from colibri.formats import BF16, F32, FORMATS
from colibri.kernels.api import Activations, Limits
from colibri.kernels.latent import LatentLimits
from colibri.kernels.native import NativeKernels
from tests.kernels.builders import (
    attention,
    batch,
    experts,
    gaussian,
    generator,
    kv_layer,
    rope,
    router,
    slots_of,
)
from tests.kernels.latents import latent, latent_cache


def library_range() -> tuple[int, int]:
    """Addresses of the library's code."""
    name = Path(_native.__file__).resolve().name
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(name)]
    return min(int(low, 16) for low, _ in spans), max(int(high, 16) for _, high in spans)


def main(threads: int) -> None:
    """Layers of one token, many times over."""
    counter, counts = ctypes.CDLL(None), (ctypes.c_int64 * 3)()
    rng = generator(1)
    kernels = NativeKernels(threads=threads, activations=Activations.INT16)
    latents = LatentLimits(4, 32, 32, 32, 40, 4, 32, 2560)
    kernels.reserve(Limits(1, 64, 256, 64, 16, 4, 64, latent=latents))
    layer = attention(rng, FORMATS["int4-g32"], 64, kv_heads=2, head_dim=32)
    kv, x = kv_layer(layer, BF16, 40), gaussian(rng, 1, 64)
    gate = router(rng, F32, 64, 16, 4, True)
    moe, slots = experts(rng, FORMATS["int4-g32"], 64, 64, 16, shared=True)
    token = batch([2500], [0], np.arange(40, dtype=np.int32)[None])
    table = rope(token.positions, 32)
    sparse = latent(rng, F32, hidden=64, heads=4, rank=32, q_rank=32, top_k=99, index_heads=4)
    cache, selected = latent_cache(sparse, BF16, 40), np.zeros((1, 99), np.int32)
    turned = rope(token.positions, 8)
    kv.pool[:], cache.latent.pool[:] = 0, 0
    for step in range(60):
        if step == 10:
            counter.count_from(*map(ctypes.c_size_t, library_range()))
        kernels.attention_step(layer, x, token, table, kv)
        kernels.latent_step(sparse, x, token, turned, cache, selected)
        found = kernels.route_step(gate, x)
        y = np.zeros_like(x)
        kernels.moe_step(moe, found, found.experts, slots_of(moe, found.experts), slots, y)
        kernels.moe_finish(moe, found, y, x)
    counter.counted(counts)
    print(*counts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
