"""Row operations and recurrences in C; see `kernels.recurrent_api`, native/abi_recurrent.cdef."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer
from colibri.kernels.native_calls import NativeCalls
from colibri.kernels.native_latent import cell_layer_of
from colibri.kernels.recurrent_api import (
    Activation,
    DecayGate,
    DeltaRule,
    GroupNorm,
    Projections,
    ShortConv,
)

_ACTIVATIONS: dict[Activation, int] = {"sigmoid": 0, "silu": 1, "softplus": 2, "exp": 3}
_GATES = {None: 0, "sigmoid": 1, "silu": 2}
_MOST_KEY_DIM, _MOST_KERNEL = 1024, 16  # of native/kern_recurrent.h
_FLOAT32 = np.dtype(np.float32)


class NativeRecurrent(NativeCalls):
    """`RowKernels` and `RecurrentKernels` in C; a part of `NativeKernels`."""

    _last_rows: tuple[Batch, Any] | None = None  # all layers of a step share them

    def project(self, layer: Projections, x: Floats) -> tuple[Floats, ...]:
        """See `RowKernels.project`."""
        ffi, structs = self._library.ffi, self._structs
        rows, width = len(x), layer.matrices[0].columns
        if any(matrix.columns != width for matrix in layer.matrices):
            raise ValueError("matrices over one input must have the same number of columns")
        pointers = [structs.matrix(matrix) for matrix in layer.matrices]
        matrices = ffi.new("colibri_matrix *[]", pointers)
        norm = ffi.NULL if layer.norm is None else structs.norm(layer.norm)
        c_x = self._floats(x, (rows, width), "x")
        out = tuple(np.empty((rows, matrix.rows), np.float32) for matrix in layer.matrices)
        c_out = ffi.new("float *[]", [ffi.from_buffer("float[]", array) for array in out])
        self._do("colibri_project", norm, matrices, len(out), c_x, rows, c_out)
        return out

    def norm_rows(self, norm: GroupNorm, x: Floats, gate: Floats | None = None) -> Floats:
        """See `RowKernels.norm_rows`."""
        rows, width = x.shape
        if width % norm.width or (gate is None) != (norm.gate is None):
            raise ValueError(
                f"x is {width} wide for groups of {norm.width}, gated by {norm.gate}: "
                f"{'no' if gate is None else 'a'} gate is given"
            )
        if norm.weight is not None and norm.weight.size not in (norm.width, width):
            raise ValueError(f"{norm.weight.size} norm weights do not fit groups of {norm.width}")
        null = (self._library.ffi.NULL, 0)
        c_gate = null if gate is None else self._rows(gate, x.shape, "gate")
        layer = self._structs.made("colibri_group_norm", norm, self._group_norm)
        out = np.empty((rows, width), np.float32)
        c_out = self._library.ffi.from_buffer("float[]", out)
        self._do(
            "colibri_norm_rows", layer, *self._rows(x, x.shape, "x"), *c_gate, rows, width, c_out
        )
        return out

    def activate(self, activation: Activation, x: Floats) -> Floats:
        """See `RowKernels.activate`."""
        out = np.empty(x.shape, np.float32)
        c_x, c_out = self._rows(x, x.shape, "x"), self._library.ffi.from_buffer("float[]", out)
        self._do("colibri_activate", _ACTIVATIONS[activation], *c_x, *x.shape, c_out)
        return out

    def decay(self, gate: DecayGate, a: Floats) -> Floats:
        """See `RowKernels.decay`."""
        c_a = self._rows(a, (len(a), gate.bias.size), "a")
        layer = self._structs.made("colibri_decay", gate, self._decay)
        out = np.empty(a.shape, np.float32)
        c_out = self._library.ffi.from_buffer("float[]", out)
        self._do("colibri_decay_rows", layer, *c_a, len(a), c_out)
        return out

    def short_conv(self, layer: ShortConv, x: Floats, batch: Batch, state: CellLayer) -> None:
        """See `RecurrentKernels.short_conv`."""
        c_x = self._rows(x, (len(batch.members), layer.weight.shape[0]), "x")
        c_layer = self._structs.made("colibri_short_conv", layer, self._short_conv)
        self._do("colibri_conv_rows", c_layer, self._state(state), self._cell_rows(batch), *c_x)

    def delta_rule(
        self,
        layer: DeltaRule,
        q: Floats,
        k: Floats,
        v: Floats,
        decay: Floats,
        beta: Floats,
        batch: Batch,
        state: CellLayer,
    ) -> Floats:
        """See `RecurrentKernels.delta_rule`."""
        tokens, width = len(batch.members), layer.num_heads * layer.value_dim
        keys = (tokens, layer.num_key_heads * layer.key_dim)
        operands = (
            *self._rows(q, keys, "q"),
            *self._rows(k, keys, "k"),
            *self._rows(v, (tokens, width), "v"),
            *self._rows(decay, (tokens, layer.num_heads * layer.decay_width), "decay"),
            *self._rows(beta, (tokens, layer.num_heads), "beta"),
        )
        out = np.empty((tokens, width), np.float32)
        c_layer = self._structs.made("colibri_delta_rule", layer, _delta_rule)
        c_out = self._library.ffi.from_buffer("float[]", out)
        c_rows, c_state = self._cell_rows(batch), self._state(state)
        self._do("colibri_delta_rows", c_layer, c_state, c_rows, *operands, c_out)
        return out

    def _rows(self, array: Floats, shape: tuple[int, ...], what: str) -> tuple[Any, int]:
        """Address of the first row and the distance of rows in floats."""
        strides = array.strides
        dense = len(shape) == 2 and array.shape == shape and array.dtype == _FLOAT32
        apart = array.size > 0 and strides[1] != 4 and shape[1] > 1
        if not dense or apart or strides[0] % 4 or strides[0] < 0:
            raise ValueError(
                f"{what} must be float32 rows {list(shape)}, each contiguous, "
                f"not {array.dtype} {list(array.shape)} with strides {strides}"
            )
        if array.flags.c_contiguous:
            return self._library.ffi.from_buffer("float[]", array), strides[0] // 4
        return self._library.ffi.cast("float *", array.ctypes.data), strides[0] // 4

    def _cell_rows(self, batch: Batch) -> Any:
        """`colibri_cell_rows *`, the one of the layer before where it serves."""
        last = self._last_rows
        if last is not None and last[0] is batch:
            return last[1]
        values = {
            "members": self._ints(batch.members, (-1,), "members"),
            "cells": self._ints(batch.cells, (-1,), "cells"),
            "rows": len(batch.members),
            "num_members": len(batch.cells),
        }
        c_rows = self._library.ffi.new("colibri_cell_rows *", values)
        self._last_rows = batch, c_rows
        return c_rows

    def _state(self, state: CellLayer) -> Any:
        return self._structs.made(
            "colibri_cell_layer", state, lambda c: cell_layer_of(self._structs, c)
        )

    def _optional(self, array: Floats | None, shape: tuple[int, ...], what: str) -> Any:
        return self._library.ffi.NULL if array is None else self._floats(array, shape, what)

    def _group_norm(self, norm: GroupNorm) -> dict[str, Any]:
        return {
            "weight": self._optional(norm.weight, (-1,), "norm weight"),
            "width": norm.width,
            "num_weights": 0 if norm.weight is None else norm.weight.size,
            "eps": norm.eps,
            "of_sum": norm.of_sum,
            "gate": _GATES[norm.gate],
        }

    def _decay(self, gate: DecayGate) -> dict[str, Any]:
        heads, width = gate.num_heads, gate.bias.size // gate.num_heads
        if heads * width != gate.bias.size or gate.a_log.size < heads:
            raise ValueError(
                f"{heads} heads take as many numbers of a_log, not {gate.a_log.size}, and a "
                f"multiple of biases, not {gate.bias.size}"
            )
        if gate.lower_bound is not None and not gate.lower_bound < 0:
            raise ValueError(f"lower_bound must be negative, not {gate.lower_bound}")
        return {
            "a_log": self._floats(gate.a_log, (-1,), "a_log"),
            "bias": self._floats(gate.bias, (-1,), "bias"),
            "heads": heads,
            "width": width,
            "lower_bound": gate.lower_bound or 0.0,
        }

    def _short_conv(self, layer: ShortConv) -> dict[str, Any]:
        channels, kernel = layer.weight.shape
        if not 1 <= kernel <= _MOST_KERNEL:
            raise ValueError(f"a short convolution has 1 to {_MOST_KERNEL} taps, not {kernel}")
        return {
            "weight": self._floats(layer.weight, (channels, kernel), "convolution weight"),
            "bias": self._optional(layer.bias, (channels,), "convolution bias"),
            "channels": channels,
            "kernel": kernel,
            "silu": layer.silu,
            "residual": layer.residual,
            "dilation": layer.dilation,
        }


def _delta_rule(layer: DeltaRule) -> dict[str, Any]:
    if layer.num_heads % layer.num_key_heads or layer.key_dim > _MOST_KEY_DIM:
        raise ValueError(
            f"{layer.num_heads} heads must be a multiple of {layer.num_key_heads} key heads, and "
            f"key_dim {layer.key_dim} at most {_MOST_KEY_DIM}"
        )
    return {
        "key_heads": layer.num_key_heads,
        "heads": layer.num_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "decay_width": layer.decay_width,
        "eps": layer.eps,
        "scale": layer.scale,
    }
