"""Weights as the structs of the native ABI.

Every struct is built once for its dataclass and kept beside it, which keeps alive what it points
to; a step then costs a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Bytes, FloatFormat, Floats, FP8Format, RowInt8Format
from colibri.kernels.api import (
    FFN,
    KV_BLOCK,
    KV_UNIT,
    Attention,
    ExpertPart,
    Experts,
    KVLayer,
    Matrix,
    Norm,
    Router,
    Slots,
    Swiglu,
)
from colibri.kernels.heads import Heads, RelativeBias
from colibri.kernels.library import Library

T = TypeVar("T")

_DTYPES: dict[type, np.dtype[Any]] = {
    kind: np.dtype(kind) for kind in (np.float32, np.int32, np.int64, np.uint8)
}

_MOST_HEAD_DIM = 512  # MOST_HEAD_DIM of native/kern_mix.h
_MOST_RELATIVE = 64  # MOST_RELATIVE of native/kern_attend.h
_MOST_GROUPS = 64  # MOST_GROUPS of native/kern_route.h


def address_of(
    library: Library, array: NDArray[Any], dtype: type, kind: str, shape: tuple[int, ...], what: str
) -> Any:
    """A C pointer to a contiguous array of that type and shape (-1 in a shape: any size).

    Raises:
        ValueError: the array is anything else; native code would read past it.
    """
    if (array.shape != shape and not _fits(array.shape, shape)) or array.dtype != _DTYPES[dtype]:
        raise _refusal(array, dtype, shape, what)
    try:
        return library.ffi.from_buffer(kind, array)
    except ValueError:  # it is not contiguous, so it has no such buffer
        raise _refusal(array, dtype, shape, what) from None


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    sizes = zip(shape, found, strict=False)
    return len(found) == len(shape) and all(want in (-1, size) for want, size in sizes)


def _refusal(array: NDArray[Any], dtype: type, shape: tuple[int, ...], what: str) -> ValueError:
    return ValueError(
        f"{what} must be a contiguous {np.dtype(dtype)} array {list(shape)}, "
        f"not {array.dtype} {list(array.shape)} with strides {array.strides}"
    )


@dataclass(slots=True)
class Structs:
    """Builds structs and keeps them, for each object by its identity."""

    library: Library
    _kept: dict[int, tuple[object, Any]] = field(default_factory=dict)
    _kv_of: dict[tuple[int, int], tuple[Heads, KVLayer, Any]] = field(default_factory=dict)

    def _once(self, source: T, build: Callable[[T], Any]) -> Any:
        kept = self._kept.get(id(source))
        if kept is None:
            kept = self._kept[id(source)] = (source, build(source))
        return kept[1]

    def _new(self, kind: str, values: dict[str, Any]) -> Any:
        return self.library.ffi.new(f"{kind} *", values)

    def made(self, kind: str, source: T, build: Callable[[T], dict[str, Any]]) -> Any:
        """`kind *` of the values that `build` gives for `source`, made once."""
        return self._once(source, lambda s: self._new(kind, build(s)))

    def _bytes(self, array: Bytes, what: str) -> Any:
        return address_of(self.library, array, np.uint8, "uint8_t[]", (-1,), what)

    def _floats(self, array: Floats, shape: tuple[int, ...], what: str) -> Any:
        return address_of(self.library, array, np.float32, "float[]", shape, what)

    def matrix(self, matrix: Matrix) -> Any:
        """`colibri_matrix *`."""
        return self._once(matrix, lambda m: self._new("colibri_matrix", self._matrix(m)))

    def norm(self, norm: Norm) -> Any:
        """`colibri_norm *`."""
        return self._once(norm, lambda n: self._new("colibri_norm", self._norm(n)))

    def attention(self, layer: Attention) -> Any:
        """`colibri_attention *`."""
        return self._once(layer, lambda a: self._new("colibri_attention", self._attention(a)))

    def heads(self, layer: Heads) -> Any:
        """`colibri_attention *` without projections."""
        return self._once(layer, lambda h: self._new("colibri_attention", self._heads(h)))

    def ffn(self, layer: FFN) -> Any:
        """`colibri_ffn *`."""
        return self._once(layer, lambda f: self._new("colibri_ffn", self._ffn(f)))

    def router(self, layer: Router) -> Any:
        """`colibri_router *`."""
        return self._once(layer, lambda r: self._new("colibri_router", self._router(r)))

    def experts(self, layer: Experts) -> Any:
        """`colibri_experts *`."""
        return self._once(layer, lambda e: self._new("colibri_experts", self._experts(e)))

    def kv_of(self, attention: Heads, layer: KVLayer) -> Any:
        """`colibri_kv *` of a pool that was made for such attention.

        Raises:
            ValueError: heads or block size differ.
        """
        kept = self._kv_of.get((id(attention), id(layer)))
        if kept is None:
            check_kv(attention, layer)
            made = self._new("colibri_kv", self._kv(layer))
            kept = self._kv_of[id(attention), id(layer)] = (attention, layer, made)
        return kept[2]

    def slots(self, table: Slots) -> Any:
        """`colibri_slots *`."""
        return self._once(table, lambda t: self._new("colibri_slots", self._slots(t)))

    def _matrix(self, m: Matrix) -> dict[str, Any]:
        nbytes, found = m.format.resident_nbytes((m.rows, m.columns)), m.data.size
        if found < nbytes:
            raise ValueError(
                f"{m.format} [{m.rows}, {m.columns}] takes {nbytes} bytes, not {found}"
            )
        null = self.library.ffi.NULL
        return {
            "data": self._bytes(m.data, "matrix data"),
            "bias": null if m.bias is None else self._floats(m.bias, (m.rows,), "bias"),
            "panel_stride": m.format.panel_nbytes(m.columns),
            "format": m.format.code,
            "rows": m.rows,
            "columns": m.columns,
        }

    def _part(self, part: ExpertPart) -> dict[str, Any]:
        whole = part.format.panel_nbytes(part.columns)
        if isinstance(part.format, FP8Format) and part.panel_stride != whole:
            raise ValueError(f"panels of {part.format} follow each other, not {part.panel_stride}")
        return {
            "panel_stride": part.panel_stride,
            "format": part.format.code,
            "rows": part.rows,
            "columns": part.columns,
        }

    def _norm(self, norm: Norm | None) -> dict[str, Any]:
        if norm is None:
            return {}
        weight = self._floats(norm.weight, (-1,), "norm weight")
        return {"weight": weight, "eps": norm.eps, "width": norm.weight.size}

    def _attention(self, a: Attention) -> dict[str, Any]:
        _check_attention(a)
        projections = ("q_proj", "k_proj", "v_proj", "o_proj")
        return {
            **self._heads(a),
            **{name: self._matrix(getattr(a, name)) for name in projections},
            "norm": self._norm(a.norm),
        }

    def _heads(self, a: Heads) -> dict[str, Any]:
        _check_heads(a)
        plain = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "scale")
        return {
            **{name: getattr(a, name) for name in plain},
            "q_norm": self._norm(a.q_norm),
            "k_norm": self._norm(a.k_norm),
            "rope_pairs": a.rope_pairing == "pair",
            "window": a.window or 0,
            "clip": math.inf if a.clip is None else a.clip,
            "sinks": self._optional(a.sinks, a.num_heads, "sinks"),
            "gated": a.gated,
            **self._relative(a.relative),
        }

    def _relative(self, bias: RelativeBias | None) -> dict[str, Any]:
        if bias is None:
            return {}
        rank, extent = bias.weight.shape
        weight = self._floats(bias.weight, (rank, extent), "relative bias")
        return {"relative": weight, "relative_rank": rank, "relative_extent": extent}

    def _optional(self, array: Floats | None, size: int, what: str) -> Any:
        return self.library.ffi.NULL if array is None else self._floats(array, (size,), what)

    def _ffn(self, f: FFN) -> dict[str, Any]:
        _check_glu(f.gate_proj, f.up_proj, f.down_proj, f.activation)
        return {
            "norm": self._norm(f.norm),
            "gate_proj": self._matrix(f.gate_proj),
            "up_proj": self._matrix(f.up_proj),
            "down_proj": self._matrix(f.down_proj),
            "act": _swiglu(f.swiglu),
        }

    def _router(self, r: Router) -> dict[str, Any]:
        _check_router(r)
        plain = ("num_experts_per_tok", "normalize", "num_groups", "num_groups_used")
        return {
            **{name: getattr(r, name) for name in (*plain, "group_top", "epsilon", "factor")},
            "num_shared": r.num_shared,
            "norm": self._norm(r.norm),
            "gate": self._matrix(r.gate),
            "bias": self._optional(r.bias, r.num_routed, "bias"),
            "scoring": ("softmax", "sigmoid", "sqrtsoftplus").index(r.scoring),
        }

    def _experts(self, e: Experts) -> dict[str, Any]:
        _check_glu(e.gate_proj, e.up_proj, e.down_proj, e.activation)
        return {
            "gate_proj": self._part(e.gate_proj),
            "up_proj": self._part(e.up_proj),
            "down_proj": self._part(e.down_proj),
            "act": _swiglu(e.swiglu),
            "shared": {} if e.shared is None else self._ffn(e.shared),
            "shared_gate": {} if e.shared_gate is None else self._matrix(e.shared_gate),
        }

    def _kv(self, kv: KVLayer) -> dict[str, Any]:
        if not isinstance(kv.format, FloatFormat | RowInt8Format):
            raise ValueError(f"the K/V pool holds f32, bf16, f16 or int8, not {kv.format}")
        return {
            "pool": self._bytes(kv.pool, "K/V pool"),
            "pool_nbytes": kv.pool.size,
            "block_nbytes": kv.block_nbytes,
            "offset": kv.offset,
            "format": kv.format.code,
        }

    def _slots(self, t: Slots) -> dict[str, Any]:
        num, library = len(t.states), self.library
        return {
            "arena": self._bytes(t.arena, "arena"),
            "arena_nbytes": t.arena.size,
            "parts": address_of(library, t.parts, np.int64, "int64_t[]", (num, 3), "parts"),
            "biases": library.ffi.NULL
            if t.biases is None
            else address_of(library, t.biases, np.int64, "int64_t[]", (num, 3), "biases"),
            "states": address_of(library, t.states, np.int32, "int32_t[]", (num,), "states"),
            "num_slots": num,
        }


def check_kv(layer: Heads, kv: KVLayer) -> None:
    """Refuse a pool that was made for other heads.

    Raises:
        ValueError: heads or block size differ.
    """
    nbytes = 2 * kv.format.nbytes((kv.num_kv_heads * KV_BLOCK, kv.head_dim))
    if (kv.num_kv_heads, kv.head_dim) != (layer.num_kv_heads, layer.head_dim):
        raise ValueError("the K/V pool was made for another number or size of heads")
    room = kv.pool.size if kv.block_nbytes == KV_UNIT else kv.block_nbytes
    if kv.offset < 0 or kv.offset + nbytes > room:
        raise ValueError(f"{nbytes} bytes at {kv.offset} do not fit a block of {kv.block_nbytes}")


def _check_attention(a: Attention) -> None:
    q_width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    width = a.norm.weight.size
    want = {
        "q_proj": (2 * q_width if a.gated else q_width, width),
        "k_proj": (kv_width, width),
        "v_proj": (kv_width, width),
        "o_proj": (width, q_width),
    }
    found = {name: (getattr(a, name).rows, getattr(a, name).columns) for name in want}
    if found != want:
        raise ValueError(f"attention shapes contradict each other: {found}, wanted {want}")


def _check_heads(a: Heads) -> None:
    norms = [(a.q_norm, a.num_heads * a.head_dim), (a.k_norm, a.num_kv_heads * a.head_dim)]
    norms_fit = all(n is None or n.weight.size in (a.head_dim, full) for n, full in norms)
    if not norms_fit or a.num_heads % a.num_kv_heads:
        raise ValueError(f"heads contradict each other: {a}")
    if a.relative is not None and a.relative.weight.shape[0] > _MOST_RELATIVE:
        raise ValueError(f"the rank of relative biases is at most {_MOST_RELATIVE}")
    if a.head_dim > _MOST_HEAD_DIM or not 0 <= a.rotary_dim <= a.head_dim or a.rotary_dim % 2:
        raise ValueError(
            f"head_dim {a.head_dim} must be at most {_MOST_HEAD_DIM}, "
            f"and rotary_dim {a.rotary_dim} even and no larger"
        )


def _swiglu(s: Swiglu) -> dict[str, Any]:
    limit = math.inf if s.limit is None else s.limit
    return {"limit": limit, "alpha": s.alpha, "offset": s.offset}


def _check_router(r: Router) -> None:
    groups, used, num = r.num_groups, r.num_groups_used, r.num_routed
    if not 1 <= used <= groups <= _MOST_GROUPS or num % groups or not 1 <= r.group_top <= 16:
        raise ValueError(f"{num} experts cannot be chosen from {used} of {groups} groups")
    if not 1 <= r.num_experts_per_tok <= num // groups * used:
        raise ValueError(f"{r.num_experts_per_tok} of {num} experts are wanted for each token")
    if r.bias is not None and not np.isfinite(r.bias).all():
        raise ValueError("the router's bias is not finite")


def _check_glu(
    gate: Matrix | ExpertPart, up: Matrix | ExpertPart, down: Matrix | ExpertPart, activation: str
) -> None:
    if activation != "silu":
        raise ValueError(f"activation {activation!r} has no kernel")
    shape = (gate.rows, gate.columns)
    if (up.rows, up.columns) != shape or (down.rows, down.columns) != shape[::-1]:
        raise ValueError(f"gate, up and down contradict each other: {gate}, {up}, {down}")


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Memory `[nbytes]` whose start is a multiple of 64."""
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]
