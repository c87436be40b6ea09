"""The operations of `kernels.api` in C, through the flat ABI of native/abi_kernels.cdef.

Each step is one call that releases the GIL. Results do not depend on threads, on the instruction
set or on how tokens are grouped into calls.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from colibri.errors import NativeLibraryError, SettingsError
from colibri.formats import Floats
from colibri.kernels.api import (
    FFN,
    Activations,
    Attention,
    Batch,
    Experts,
    Head,
    Ints,
    KVLayer,
    Limits,
    Matrix,
    RopeTable,
    Router,
    Routing,
    Slots,
)
from colibri.kernels.cpus import num_threads
from colibri.kernels.heads import Heads
from colibri.kernels.latent import LatentAttention, LatentCache
from colibri.kernels.library import load
from colibri.kernels.native_gated import NativeGated
from colibri.kernels.native_latent import check_selected, latent_layer, latent_state
from colibri.kernels.native_shared_key import NativeSharedKey
from colibri.kernels.native_structs import Structs, address_of, aligned

_CODES = {Activations.FLOAT32: 0, Activations.INT16: 1, Activations.INT8: 2}


def instruction_sets() -> list[str]:
    """Instruction sets that are compiled in and run on this CPU, the fastest first."""
    return list(_tables())


class NativeKernels(NativeGated, NativeSharedKey):
    """`Kernels` in C.

    Attributes:
        isa: the instruction set in use.
        threads: threads that compute, the caller's among them.
        waits: `[N, 2]` where `moe_step` writes when waits began and ended (monotonic clock, ns).
        num_waits: how many the last `moe_step` wrote.
    """

    name = "native"

    def __init__(
        self,
        threads: int | None = None,
        activations: Activations = Activations.INT16,
        isa: str | None = None,
    ) -> None:
        """`isa` None means the fastest that runs here.

        Raises:
            NativeLibraryError: the library is missing, or its threads cannot be started.
            SettingsError: `isa` is not one of `instruction_sets()`, or `threads` is below 1.
        """
        tables = _tables()
        if isa is not None and isa not in tables:
            known = ", ".join(tables)
            raise SettingsError(f"instruction set {isa!r} does not run here; these do: {known}")
        if threads is not None and threads < 1:
            raise SettingsError(f"threads must be at least 1, not {threads}")
        self.activations = activations
        self.isa = next(iter(tables)) if isa is None else isa
        self.threads = num_threads() if threads is None else threads
        self._library = load()
        self._structs = Structs(self._library)
        self._context = self._library.ffi.new("colibri_context *")
        self._context.table = tables[self.isa]
        self._context.activations = _CODES[activations]
        self._context.pool = _start_pool(self, self.threads)
        self._workspace = aligned(0)
        # The struct of the step at hand, which three calls share.
        self._routing: tuple[Routing, Any] | None = None
        self._stream: tuple[Floats, Any] | None = None  # x of all its layers
        self.waits: NDArray[np.int64] | None = None
        self.num_waits = 0

    def workspace_nbytes(self, limits: Limits) -> int:
        """Bytes that `reserve(limits)` will take."""
        return int(self._library.lib.colibri_workspace_nbytes(self._limits(limits)))

    def reserve(self, limits: Limits) -> None:
        """Allocate the workspace."""
        self._workspace = aligned(self.workspace_nbytes(limits))
        self._context.workspace = self._library.ffi.from_buffer(self._workspace)
        self._context.workspace_nbytes = self._workspace.size

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        """Rows of the table."""
        out = np.empty((len(ids), table.columns), np.float32)
        matrix = self._structs.matrix(table)
        self._do("colibri_embed", matrix, self._ints(ids, (-1,), "ids"), len(ids), self._out(out))
        return out

    def attention_step(
        self,
        layer: Attention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        kv: KVLayer,
        y: Floats | None = None,
    ) -> None:
        """See `Kernels.attention_step`."""
        c_kv = self._structs.kv_of(layer, kv)
        c_x = self._residual(x, (len(batch.positions), layer.norm.weight.size))
        c_y = c_x if y is None or y is x else self._floats(y, x.shape, "y")
        c_batch = self._batch_of(batch, rope, layer.rotary_dim // 2, x.shape[1])
        self._do("colibri_attention_step", self._structs.attention(layer), c_x, c_batch, c_kv, c_y)

    def attend(
        self,
        layer: Heads,
        q: Floats,
        k: Floats,
        v: Floats,
        batch: Batch,
        rope: RopeTable,
        kv: KVLayer,
        *,
        relative: Floats | None = None,
        temperature: Floats | None = None,
        selected: Ints | None = None,
    ) -> Floats:
        """See `kernels.heads`."""
        c_kv = self._structs.kv_of(layer, kv)
        if (relative is None) != (layer.relative is None):
            raise ValueError("relative biases take a weight and an operand")
        rows, width = len(batch.positions), layer.num_heads * layer.head_dim
        null = self._library.ffi.NULL
        kv_shape = (rows, layer.num_kv_heads * layer.head_dim)
        rank = 0 if layer.relative is None else layer.relative.weight.shape[0]
        values = {
            "q": self._floats(q, (rows, 2 * width if layer.gated else width), "q"),
            "k": self._floats(k, kv_shape, "k"),
            "v": self._floats(v, kv_shape, "v"),
            "relative": null
            if relative is None
            else self._floats(relative, (rows, layer.num_heads * rank), "relative"),
            "temperature": null
            if temperature is None
            else self._floats(temperature, (rows,), "temperature"),
            "selected": null if selected is None else self._ints(selected, (rows, -1), "selected"),
            "most_selected": 0 if selected is None else selected.shape[1],
        }
        out = np.empty((rows, width), np.float32)
        heads = self._library.ffi.new("colibri_heads *", values)
        c_batch = self._batch_of(batch, rope, layer.rotary_dim // 2, width)
        self._do("colibri_attend", self._structs.heads(layer), heads, c_batch, c_kv, self._out(out))
        return out

    def latent_step(
        self,
        layer: LatentAttention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        cache: LatentCache,
        selected: Ints | None = None,
        y: Floats | None = None,
    ) -> None:
        """See `Kernels.latent_step`."""
        rows = len(batch.positions)
        check_selected(layer, batch, selected)
        c_x = self._floats(x, (rows, layer.norm.weight.size), "x")
        c_y = c_x if y is None or y is x else self._floats(y, x.shape, "y")
        c_batch = self._batch_of(batch, rope, layer.rotary_dim // 2, x.shape[1])
        c_layer, c_state = (
            latent_layer(self._structs, layer),
            latent_state(self._structs, layer, cache),
        )
        if cache.sums is not None:
            c_state.rows = self._cell_rows(batch)
        c_state.selected = (
            self._library.ffi.NULL
            if selected is None
            else self._ints(selected, (rows, layer.top_k or 0), "selected")
        )
        self._do("colibri_latent_step", c_layer, c_x, c_batch, c_state, c_y)

    def ffn_step(self, layer: FFN, x: Floats, y: Floats | None = None) -> None:
        """See `Kernels.ffn_step`."""
        c_x = self._floats(x, (-1, layer.gate_proj.columns), "x")
        c_y = c_x if y is None or y is x else self._floats(y, x.shape, "y")
        self._do("colibri_ffn_step", self._structs.ffn(layer), c_x, len(x), c_y)

    def route_step(self, layer: Router, x: Floats, given: Ints | None = None) -> Routing:
        """See `Kernels.route_step`."""
        rows, active = len(x), layer.num_experts_per_tok
        hidden = np.empty((rows, layer.gate.columns), np.float32)
        ids = np.empty((rows, active), np.int32) if given is None else given
        weights = np.empty((rows, active), np.float32)
        experts = np.empty(min(layer.num_routed, rows * active), np.int32)
        shared = np.empty((rows, layer.num_shared), np.float32) if layer.num_shared else None
        c_routing = self._new_routing(layer.num_routed, hidden, ids, weights)
        c_routing.given = given is not None
        c_routing.experts = self._library.ffi.from_buffer("int32_t[]", experts)
        if shared is not None:
            c_routing.shared = self._out(shared)
        c_x = self._residual(x, hidden.shape)
        self._do("colibri_route_step", self._structs.router(layer), c_x, c_routing)
        routing = Routing(hidden, ids, weights, experts[: c_routing.num_used], shared)
        self._routing = routing, c_routing
        return routing

    def moe_step(
        self, layer: Experts, routing: Routing, experts: Ints, slots: Ints, table: Slots, y: Floats
    ) -> None:
        """See `Kernels.moe_step`."""
        ffi = self._library.ffi
        progress = ffi.new("colibri_progress *")
        if self.waits is not None:
            progress.most_waits = len(self.waits)
            progress.waits = ffi.from_buffer("int64_t[]", self.waits)
        try:
            self._do(
                "colibri_moe_step",
                self._structs.experts(layer),
                self._routed(layer, routing),
                self._ints(experts, (len(experts),), "experts"),
                self._ints(slots, (len(experts),), "slots"),
                len(experts),
                self._structs.slots(table),
                progress,
                self._floats(y, routing.hidden.shape, "y"),
            )
        finally:
            self.num_waits = progress.num_waits

    def moe_finish(self, layer: Experts, routing: Routing, y: Floats, x: Floats) -> None:
        """See `Kernels.moe_finish`."""
        shape = routing.hidden.shape
        c_y, c_x = self._floats(y, shape, "y"), self._residual(x, shape)
        c_layer = self._structs.experts(layer)
        self._do("colibri_moe_finish", c_layer, self._routed(layer, routing), c_y, c_x)

    def head_step(self, layer: Head, x: Floats) -> Floats:
        """See `Kernels.head_step`."""
        if layer.norm is None:
            return self.matmul(layer.lm_head, x)
        out = np.empty((len(x), layer.lm_head.rows), np.float32)
        c_x = self._floats(x, (-1, layer.lm_head.columns), "x")
        norm, matrix = self._structs.norm(layer.norm), self._structs.matrix(layer.lm_head)
        self._do("colibri_head_step", norm, matrix, c_x, len(x), self._out(out))
        return out

    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """See `Kernels.matmul`."""
        out = np.empty((len(x), matrix.rows), np.float32)
        c_x = self._floats(x, (-1, matrix.columns), "x")
        self._do("colibri_matmul", self._structs.matrix(matrix), c_x, len(x), self._out(out))
        return out

    def exp(self, x: Floats) -> Floats:
        """The library's own exponential, which softmax, sigmoid and silu are made of."""
        out = np.empty_like(x)
        c_x = self._floats(x, (-1,), "x")
        self._library.lib.colibri_exp(self._context.table, c_x, self._out(out), x.size)
        return out

    def read_sum(self, array: NDArray[np.uint8]) -> int:
        """The sum of `array`'s whole 64-bit words modulo 2^64, read by the same threads.

        Nothing reads memory faster, so benches hold the kernels against it.
        """
        data = address_of(self._library, array, np.uint8, "uint8_t[]", (-1,), "array")
        return int(self._library.lib.colibri_read_sum(self._context, data, array.size))

    def _residual(self, x: Floats, shape: tuple[int, ...]) -> Any:
        """A C pointer to the residual stream, which is one array for all layers of a step."""
        last = self._stream
        if last is not None and last[0] is x and x.shape == shape:
            return last[1]
        pointer = self._floats(x, shape, "x")
        self._stream = x, pointer
        return pointer

    def _limits(self, limits: Limits) -> Any:
        values = asdict(limits)
        del values["latent"]["index_per_block"]
        return self._library.ffi.new("colibri_limits *", values)

    def _new_routing(self, num_experts: int, hidden: Floats, ids: Ints, weights: Floats) -> Any:
        rows, active = ids.shape
        values = {
            "rows": rows,
            "num_experts_per_tok": active,
            "num_experts": num_experts,
            "hidden": self._floats(hidden, (rows, hidden.shape[1]), "hidden"),
            "ids": self._ints(ids, (rows, active), "ids"),
            "weights": self._floats(weights, (rows, active), "weights"),
        }
        return self._library.ffi.new("colibri_routing *", values)

    def _routed(self, layer: Experts, routing: Routing) -> Any:
        width, wanted = routing.hidden.shape[1], layer.gate_proj.columns
        if width != wanted:
            raise ValueError(f"hidden is {width} wide, the experts take {wanted}")
        last = self._routing
        if last is not None and last[0] is routing and last[1].num_experts == layer.num_experts:
            return last[1]
        return self._new_routing(layer.num_experts, routing.hidden, routing.ids, routing.weights)


def _tables() -> dict[str, Any]:
    """Tables of the instruction sets that run here, by name, the best first."""
    library = load()
    ffi, lib = library.ffi, library.lib
    return {
        ffi.string(lib.colibri_isa_name(i)).decode(): lib.colibri_isa_table(i)
        for i in range(lib.colibri_num_isas())
        if lib.colibri_isa_runs(i)
    }


def _start_pool(owner: object, threads: int) -> Any:
    """Threads that end with their owner."""
    lib = load().lib
    pool = lib.colibri_pool_new(threads)
    if not pool:
        raise NativeLibraryError(f"cannot start {threads} threads: give a smaller `threads`")
    finalize(owner, lib.colibri_pool_free, pool)
    return pool
