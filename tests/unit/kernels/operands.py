"""Random operands of the kernels, and the same mathematics written down once more in float64."""

import numpy as np

from colibri.formats import BF16, F32, FloatFormat, Floats, Format
from colibri.kernels.api import KV_BLOCK, Attention, Batch, KVLayer, Matrix, Norm, RopeTable

HIDDEN = 24


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    """Standard normal float32."""
    return rng.standard_normal(shape).astype(np.float32)


def matrix(weights: Floats, fmt: Format = F32, bias: Floats | None = None) -> Matrix:
    """Weights `[N, K]` as a resident matrix."""
    shape = weights.shape
    return Matrix(fmt, *shape, fmt.pack(fmt.encode(weights), shape), bias)


def random_matrix(rng: np.random.Generator, rows: int, columns: int, *, bias: bool) -> Matrix:
    """A float32 matrix whose products stay of the size of its inputs."""
    weights = normal(rng, rows, columns) * np.float32(columns**-0.5)
    return matrix(weights, bias=normal(rng, rows) if bias else None)


def norm(rng: np.random.Generator, size: int) -> Norm:
    """Weights around one."""
    return Norm(1 + normal(rng, size) / 4, 1e-5)


def values(found: Matrix) -> np.ndarray:
    """The numbers of a matrix in float64."""
    return found.format.decode(found.data, (found.rows, found.columns)).astype(np.float64)


def plain_norm(x: np.ndarray, found: Norm) -> np.ndarray:
    """RMS norm of the last axis, row by row."""
    rows = x.reshape(-1, x.shape[-1])
    out = [row / np.sqrt(sum(v * v for v in row) / len(row) + found.eps) for row in rows]
    return np.array(out).reshape(x.shape) * found.weight.astype(np.float64)


def plain_linear(found: Matrix, x: np.ndarray) -> np.ndarray:
    """`W x + bias` in float64."""
    return x @ values(found).T + (0 if found.bias is None else found.bias.astype(np.float64))


def turned(x: np.ndarray, angles: np.ndarray, pairing: str) -> np.ndarray:
    """Rotate `x [T, heads, head_dim]` by `angles [T, r]` as complex numbers."""
    half = angles.shape[1]
    wide = x.astype(np.float64)
    real, imaginary = (
        (wide[..., :half], wide[..., half : 2 * half])
        if pairing == "half"
        else (wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2])
    )
    product = (real + 1j * imaginary) * np.exp(1j * angles)[:, None]
    ends = (product.real, product.imag)
    rotated = (
        np.concatenate(ends, -1)
        if pairing == "half"
        else np.stack(ends, -1).reshape(*x.shape[:2], 2 * half)
    )
    return np.concatenate([rotated, wide[..., 2 * half :]], -1)


def plain_attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """One head of one row after another, only over the keys that it sees."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        seen = slice(first, position + 1)
        for head in range(q.shape[1]):
            keys, vals = k[seen, head // group], v[seen, head // group]
            scores = np.array([float(np.dot(q[row, head], key)) for key in keys]) * scale
            weights = np.exp(scores - scores.max())
            out[row, head] = (weights / weights.sum()) @ vals
    return out


def rope_table(angles: np.ndarray) -> RopeTable:
    """Cosine and sine of `angles [T, r]`."""
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def kv_layer(
    blocks: int, layer: Attention, fmt: FloatFormat = F32, before: int = 0, after: int = 0
) -> KVLayer:
    """A pool of `blocks`, in each of which other layers lie `before` and `after` this one."""
    own = 2 * fmt.nbytes((layer.num_kv_heads * KV_BLOCK, layer.head_dim))
    block = before + own + after
    pool = np.full(blocks * block, 0xA5, np.uint8)
    return KVLayer(pool, fmt, block, before, layer.num_kv_heads, layer.head_dim)


def rounded(x: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """What the cache keeps of `x`."""
    return fmt.to_float32(fmt.from_float32(x.astype(np.float32))).astype(np.float64)


def batch(positions: list[int], members: list[int], tables: list[list[int]]) -> Batch:
    """Rows at `positions` of sequences `members`."""
    return Batch(*(np.array(part, np.int32) for part in (positions, members, tables)))


def attention(
    rng: np.random.Generator,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    rotary_dim: int | None = None,
    pairing: str = "half",
    qk_norm: str | None = None,
    bias: bool = False,
    clip: float | None = None,
    window: int | None = None,
) -> Attention:
    """A layer with random weights."""
    q, kv = heads * head_dim, kv_heads * head_dim
    sizes = {"head": (head_dim, head_dim), "projection": (q, kv)}.get(qk_norm or "")
    return Attention(
        norm=norm(rng, HIDDEN),
        q_proj=random_matrix(rng, q, HIDDEN, bias=bias),
        k_proj=random_matrix(rng, kv, HIDDEN, bias=bias),
        v_proj=random_matrix(rng, kv, HIDDEN, bias=bias),
        o_proj=random_matrix(rng, HIDDEN, q, bias=bias),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
        rope_pairing="pair" if pairing == "pair" else "half",
        q_norm=norm(rng, sizes[0]) if sizes else None,
        k_norm=norm(rng, sizes[1]) if sizes else None,
        clip=clip,
        window=window,
    )


def plain_attention(
    layer: Attention, x: np.ndarray, positions: np.ndarray, angles: np.ndarray, fmt: FloatFormat
) -> np.ndarray:
    """`x` after the layer, for one sequence whose rows stand at 0, 1, 2, …"""

    def heads(projection: Matrix, weight: Norm | None, count: int) -> np.ndarray:
        out = plain_linear(projection, plain_norm(x.astype(np.float64), layer.norm))
        if weight is not None and weight.weight.size == layer.head_dim:
            out = plain_norm(out.reshape(len(x), count, -1), weight).reshape(len(x), -1)
        elif weight is not None:
            out = plain_norm(out, weight)
        if layer.clip is not None:
            out = np.minimum(np.maximum(out, -layer.clip), layer.clip)
        return out.reshape(len(x), count, layer.head_dim)

    q = turned(heads(layer.q_proj, layer.q_norm, layer.num_heads), angles, layer.rope_pairing)
    k = turned(heads(layer.k_proj, layer.k_norm, layer.num_kv_heads), angles, layer.rope_pairing)
    v = heads(layer.v_proj, None, layer.num_kv_heads)
    mixed = plain_attend(q, rounded(k, fmt), rounded(v, fmt), positions, layer.scale, layer.window)
    return x + plain_linear(layer.o_proj, mixed.reshape(len(x), -1))


KV_TOLERANCE = {F32: 2e-5, BF16: 2e-2}
