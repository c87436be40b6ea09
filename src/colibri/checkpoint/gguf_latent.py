"""`kv_b_proj` of latent attention as GGUF files store it: keys and values apart, keys turned.

`k_b [H, rank, nope]` and `v_b [H, v, rank]` are the rows of each head of `kv_b_proj
[H (nope + v), rank]`, the keys' transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.storage import FLOAT_DTYPES, Storage, StoredMatrix, refuse
from colibri.checkpoint.strict_json import shown
from colibri.errors import NumericsError
from colibri.formats import F32, Bytes, Floats, Shape
from colibri.formats.ggml import BY_DTYPE

_STEM = "kv_b_proj.weight"


@dataclass(frozen=True, slots=True)
class SplitLatent(StoredMatrix):
    """The matrix, put together as float32; `codes` are the keys.

    Attributes:
        values: the tensor of values.
    """

    values: TensorSpec | None = None

    def read(self, out: Bytes) -> None:
        """Write the resident bytes to `out [resident_nbytes]`; errors as of `StoredMatrix`."""
        assert self.values is not None
        keys, values = _numbers(self.codes), _numbers(self.values)
        whole = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
        out[: whole.nbytes] = np.ascontiguousarray(whole, np.float32).reshape(-1).view(np.uint8)


def take_split_latent(census: Census, name: str, shape: Shape) -> SplitLatent | None:
    """Take both halves of `kv_b_proj`, None where the checkpoint has it whole.

    Raises:
        CheckpointError: a half has another shape.
        IncompleteModelError: one is missing.
        UnsupportedModelError: a dtype that is not read.
    """
    stem = name.removesuffix(_STEM)
    keys, values = census.get(f"{stem}k_b_proj.weight"), census.get(f"{stem}v_b_proj.weight")
    if name in census or (keys is None and values is None):
        return None
    rows, rank = shape
    heads = next((each.shape[0] for each in (keys, values) if each is not None), 1)
    height = rows // max(heads, 1)
    nope = keys.shape[-1] if keys is not None and len(keys.shape) == 3 else height // 2
    found = census.take(f"{stem}k_b_proj.weight", (heads, rank, nope))
    other = census.take(f"{stem}v_b_proj.weight", (heads, height - nope, rank))
    for spec in (found, other):
        if spec.dtype not in FLOAT_DTYPES and spec.dtype not in BY_DTYPE:
            refuse(spec, f"dtype {spec.dtype} is not read")
    return SplitLatent(Storage(F32, "F32", ".weight"), shape, found, None, other)


def _numbers(spec: TensorSpec) -> Floats:
    """A tensor of floats or blocks as float32, in its shape."""
    data, columns = read_tensor(spec), spec.shape[-1]
    rows = int(np.prod(spec.shape[:-1]))
    if spec.dtype in FLOAT_DTYPES:
        values = FLOAT_DTYPES[spec.dtype].decode(data, (rows, columns))
    else:
        values = BY_DTYPE[spec.dtype].decode(data.reshape(rows, -1), (rows, columns))
    if not np.isfinite(values).all():
        raise NumericsError(
            f"{spec.file}: tensor {shown(spec.name)} holds a number that is not finite;"
            " fetch the file again"
        )
    return values.reshape(spec.shape)
