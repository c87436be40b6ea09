"""Random blocks of GGUF files, of every type, whose numbers are finite."""

import numpy as np

from colibri.formats import Bytes
from colibri.formats.ggml import BlockType

# Where the float16 numbers of a block are.
HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": ()},
}


def random_blocks(
    rng: np.random.Generator, kind: BlockType, shape: tuple[int, int], std: float = 1.0
) -> Bytes:
    """Rows `[N, row_nbytes]` of random codes, their numbers of about the deviation `std`."""
    rows, columns = shape
    data = rng.integers(0, 256, (rows, columns // kind.block, kind.nbytes), np.uint8)
    for place in HALVES[kind.name]:
        values = rng.uniform(0.5, 1, data.shape[:2]).astype("<f2")
        data[..., place : place + 2] = values[..., None].view(np.uint8)
    if kind.name == "mxfp4":
        data[..., 0] = rng.integers(120, 124, data.shape[:2])
    flat = data.reshape(rows, -1)
    factor = std / float(kind.decode(flat, shape).std()) if std != 1 else 1.0
    for place in HALVES[kind.name] if std != 1 else ():
        values = np.ascontiguousarray(data[..., place : place + 2]).view("<f2") * np.float16(factor)
        data[..., place : place + 2] = np.ascontiguousarray(values).view(np.uint8)
    return flat
