"""Carries out a plan: dense weights, K/V pool, arena and reader; layers bound to kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.coding import FloatMatrix
from colibri.checkpoint.safetensors import read_into
from colibri.errors import NumericsError
from colibri.formats import Bytes, Floats, IntegerFormat
from colibri.kernels import library
from colibri.kernels.api import Kernels, Matrix
from colibri.kernels.cpus import num_threads
from colibri.kernels.mapping import Mapping
from colibri.kernels.traced import traced_kernels
from colibri.kv import KVPool
from colibri.memory.governor import Governor
from colibri.memory.opening import open_store
from colibri.memory.prefetch import Prefetcher, PrefetchMode
from colibri.memory.pressure import watch_memory
from colibri.memory.reader_config import ReaderConfig
from colibri.memory.row_table import RowTable
from colibri.models.blueprint import Blueprint, head_prefix
from colibri.models.description import DenseTensor, Description
from colibri.models.model import BoundLayer, Model
from colibri.models.plan import KV_FORMATS, Plan
from colibri.nn.drafting import BoundDraftingHead
from colibri.nn.parameter import VECTORS
from colibri.nn.sublayer import BoundSublayer, Site
from colibri.spans import Spans

Progress: TypeAlias = Callable[[str, int, int], None]  # stage, bytes done, bytes in all
_READER = ReaderConfig()


def load_model(
    description: Description,
    plan: Plan,
    kernels: Kernels,
    progress: Progress | None = None,
    *,
    eviction: str = "mixed",
    heat: NDArray[np.float64] | None = None,
    reader: ReaderConfig = _READER,
    prefetch: PrefetchMode = "off",
    governor: Governor | None = None,
    spans: Spans | None = None,
) -> Model:
    """Load what `plan` says and nothing else.

    `eviction` names the policy of the expert store, which starts from `heat [L, E]`; `reader` says
    how experts are read. `prefetch` says whether layers are looked ahead; under "auto" the
    `governor` does, which knows nothing by default. `spans` gets every step, kernel and read,
    and is closed with the model.

    Raises:
        CheckpointError: a file changed or shrank since the census.
        NumericsError: a norm or bias is not finite.
    """
    with ExitStack() as resources:
        if spans is not None:
            resources.callback(lambda: spans.close(**asdict(store.stats)))
        weights = _load_dense(description, resources, progress)
        tables = _open_tables(description, weights, resources)
        kernels.reserve(description.blueprint.limits(plan.max_rows))
        states = description.blueprint.states(plan.max_positions)
        pool = KVPool(states, plan.num_kv_blocks, KV_FORMATS[plan.kv_format], plan.num_cells)
        resources.callback(pool.close)
        native = library.load() if kernels.name == "native" else None
        store = open_store(
            description.experts,
            plan.slots,
            library=native,
            eviction=eviction,
            active=description.blueprint.limits(1).num_experts_per_tok,
            heat=heat,
            reader=reader,
            spans=spans,
        )
        resources.callback(store.close)
        resources.callback(watch_memory(store).close)
        blueprint, bound = description.blueprint, _bind(description, weights, pool)
        num_layers = len(blueprint.layers)
        return Model(
            family=blueprint.family,
            config=blueprint.config,
            plan=plan,
            kernels=kernels if spans is None else traced_kernels(kernels, spans),
            store=store,
            kv=pool,
            trunk=blueprint.trunk.bind(weights),
            layers=tuple(map(BoundLayer, bound[:num_layers])),
            heads=_bind_heads(blueprint, weights, bound[num_layers:]),
            resources=resources.pop_all(),
            prefetcher=Prefetcher(
                store, [index for index, _ in blueprint.sparse_layers()], prefetch, governor
            ),
            spans=spans,
            tables=tables,
        )


class DenseWeights:
    """Resident dense tensors by name; the `Weights` that blocks are bound to."""

    def __init__(self) -> None:
        """Filled by the loader."""
        self._tensors: dict[str, tuple[DenseTensor, Bytes]] = {}
        self._tables: dict[str, RowTable] = {}

    def add(self, tensor: DenseTensor, data: Bytes) -> None:
        """Keep `data`, the tensor's resident bytes."""
        self._tensors[tensor.parameter.name] = tensor, data

    def add_table(self, name: str, table: RowTable) -> None:
        """Keep a table that stays on disk."""
        self._tables[name] = table

    def table(self, name: str) -> RowTable:
        """A table that stays on disk."""
        return self._tables[name]

    def vector(self, name: str) -> Floats:
        """A norm or bias `[N]` float32."""
        tensor, data = self._tensors[name]
        return data[: 4 * tensor.shape[1]].view(np.float32)

    def matrix(self, name: str, bias: str | None = None) -> Matrix:
        """A matrix in its resident format, with its bias if one is named."""
        tensor, data = self._tensors[name]
        rows, columns = tensor.shape
        added = None if bias is None else self.vector(bias)
        return Matrix(tensor.resident, rows, columns, data, added)


def _load_dense(
    description: Description, resources: ExitStack, progress: Progress | None
) -> DenseWeights:
    mapping = Mapping(description.dense_nbytes, "dense weights")
    resources.callback(mapping.close)
    weights, start = DenseWeights(), 0
    for tensor in description.dense:
        region = mapping.data[start : start + tensor.resident_nbytes]
        _fill(tensor, region)
        weights.add(tensor, region[: tensor.resident.resident_nbytes(tensor.shape)])
        start += tensor.resident_nbytes
        if progress is not None:
            progress("dense weights", start, description.dense_nbytes)
    return weights


def _open_tables(
    description: Description, weights: DenseWeights, resources: ExitStack
) -> tuple[RowTable, ...]:
    """Open what stays on disk."""
    found = []
    for tensor in description.tables:
        found.append(RowTable(tensor.shards, tensor.stored))
        resources.callback(found[-1].close)
        weights.add_table(tensor.parameter.name, found[-1])
    return tuple(found)


def _fill(tensor: DenseTensor, region: Bytes) -> None:
    """Read one tensor into its region; norms and biases become float32 and must be finite."""
    if tensor.is_rounded:
        _round(tensor, region)
    elif tensor.resident is tensor.stored and tensor.matrix is None:
        read_into(tensor.spec, region[: tensor.spec.nbytes])
    elif tensor.resident is tensor.stored:
        read_stored(tensor, region)
    else:
        stored = np.empty(tensor.stored.resident_nbytes(tensor.shape), np.uint8)
        read_stored(tensor, stored)
        values = tensor.stored.decode(stored, tensor.shape)
        region[: values.nbytes] = values.reshape(-1).view(np.uint8)
    if tensor.parameter.kind in VECTORS:
        vector = region[: 4 * tensor.shape[1]].view(np.float32)
        _check_finite(tensor, vector)
        if tensor.parameter.kind == "centred_norm":
            vector += 1


def _round(tensor: DenseTensor, region: Bytes) -> None:
    """Code a matrix on its way into memory, on every processor there is."""
    assert isinstance(tensor.resident, IntegerFormat)
    source = FloatMatrix.of(tensor.stored, tensor.shape, tensor.spec, tensor.matrix)
    source.encode(tensor.resident, region, num_threads())


def read_stored(tensor: DenseTensor, out: Bytes) -> None:
    """Read a tensor as resident bytes of the format in which it is stored."""
    if tensor.matrix is None:
        read_into(tensor.spec, out[: tensor.spec.nbytes])
    else:
        tensor.matrix.read(out)


def _check_finite(tensor: DenseTensor, values: Floats) -> None:
    broken = np.flatnonzero(~np.isfinite(values))
    if broken.size:
        raise NumericsError(
            f"{tensor.spec.file}: tensor {tensor.spec.name} holds {values[broken[0]]} at "
            f"{broken[0]}; fetch the file again"
        )


def _bind(
    description: Description, weights: DenseWeights, pool: KVPool
) -> list[tuple[BoundSublayer, ...]]:
    """The sublayers of every place of the blueprint."""
    experts, layers, number = description.experts, [], 0
    for index, prefix, layer in description.blueprint.places:
        row = experts.position.get(index)
        layout = None if row is None else experts.layers[row]
        bound: list[BoundSublayer] = []
        for sublayer in layer.sublayers:
            site = Site(index, prefix, weights, pool.layer(number), layout)
            bound.append(sublayer.bind(site))
            number += 1
        layers.append(tuple(bound))
    return layers


def _bind_heads(
    blueprint: Blueprint, weights: DenseWeights, bound: Sequence[tuple[BoundSublayer, ...]]
) -> tuple[BoundDraftingHead, ...]:
    """The drafting heads, whose sublayers are `bound`."""
    pairs = enumerate(zip(blueprint.heads, bound, strict=True))
    return tuple(head.bind(weights, head_prefix(i), layers) for i, (head, layers) in pairs)
