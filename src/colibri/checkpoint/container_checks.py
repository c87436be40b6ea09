"""Holds the files of a container against its manifest: names, sizes and headers, no contents."""

from __future__ import annotations

from pathlib import Path

from colibri.checkpoint.container_manifest import (
    MANIFEST,
    Manifest,
    checksum_tensor,
    expert_tensor,
    layer_file,
)
from colibri.checkpoint.experts import PAGE
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors import TensorSpec, read_header
from colibri.checkpoint.safetensors_writer import DTYPE_OF_FORMAT
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, IncompleteModelError

_LISTED = 5


def check_files(directory: Path, manifest: Manifest) -> None:
    """Every file is there with its size, and none that the manifest does not name.

    Raises:
        IncompleteModelError: files are missing or cut.
        CheckpointError: a file is too long, or not of this container.
    """
    missing = [name for name in manifest.files if not (directory / name).is_file()]
    if missing:
        found, listed = len(manifest.files) - len(missing), ", ".join(missing[:_LISTED])
        raise IncompleteModelError(
            f"{directory}: found {found} of the {len(manifest.files)} files that {MANIFEST} names;"
            f" missing are {listed}{', …' if len(missing) > _LISTED else ''}"
        )
    for name, wanted in manifest.files.items():
        size = (directory / name).stat().st_size
        if size != wanted.nbytes:
            kind = IncompleteModelError if size < wanted.nbytes else CheckpointError
            raise kind(
                f"{directory / name}: wanted {wanted.nbytes} bytes, found {size};"
                " fetch it again or convert again"
            )
    layers = {layer_file(layer) for layer in manifest.layouts}
    named = {name for name in manifest.files if name.startswith("experts-")}
    present = {
        path.name
        for kind in ("experts", "dense")
        for path in directory.glob(f"{kind}-*.safetensors")
    }
    for name in sorted((layers ^ named) | (present - manifest.files.keys())):
        raise CheckpointError(f"{directory / name}: {MANIFEST} does not agree that it belongs here")


def read_records(
    path: Path, layer: int, num_experts: int, layout: RecordLayout
) -> list[TensorSpec]:
    """The records of a layer, by ascending expert.

    Raises:
        CheckpointError: they are not what the manifest says of them.
    """
    header = read_header(path)
    first_ones = (expert_tensor(layer, expert) for expert in range(len(header)))
    if len(header) != num_experts or list(header) != list(first_ones):
        raise CheckpointError(
            f"{path}: wanted {num_experts} tensors {expert_tensor(layer, 0)}, … in order, found"
            f" {len(header)}: {shown(list(header))}"
        )
    for spec in header.values():
        if (spec.dtype, spec.shape) != ("U8", (layout.nbytes,)):
            raise _mismatch(spec, "U8", (layout.nbytes,))
        if spec.offset % PAGE:
            raise CheckpointError(f"{path}: tensor {spec.name} starts at {spec.offset}, not a page")
    return list(header.values())


def read_dense(directory: Path, manifest: Manifest) -> dict[int, TensorSpec]:
    """Check every dense tensor; returns the checksum table of each MoE layer.

    Raises:
        CheckpointError: a tensor is there twice, unknown to the manifest, or of another kind.
        IncompleteModelError: a tensor is missing.
    """
    tensors = _read_headers(directory, manifest)
    for name, (fmt, shape) in manifest.dense.items():
        if not fmt.is_plain:
            _take(directory, tensors, name, "U8", (fmt.resident_nbytes((shape[0], shape[1])),))
        else:
            _take(directory, tensors, name, DTYPE_OF_FORMAT[fmt.name], shape)
    checksums = {
        layer: _take(directory, tensors, checksum_tensor(layer), "U32", (experts,))
        for layer, experts in manifest.num_experts.items()
    }
    for spec in tensors.values():
        raise CheckpointError(f"{spec.file}: {MANIFEST} does not know tensor {shown(spec.name)}")
    return checksums


def _read_headers(directory: Path, manifest: Manifest) -> dict[str, TensorSpec]:
    tensors: dict[str, TensorSpec] = {}
    for name in sorted(manifest.files):
        if name.startswith("dense-"):
            header = read_header(directory / name)
            for twice in tensors.keys() & header.keys():
                raise CheckpointError(
                    f"{directory / name}: tensor {shown(twice)} is also in"
                    f" {tensors[twice].file.name}"
                )
            tensors |= header
    return tensors


def _take(
    directory: Path, tensors: dict[str, TensorSpec], name: str, dtype: str, shape: tuple[int, ...]
) -> TensorSpec:
    """Take a tensor out of `tensors`, checked."""
    spec = tensors.pop(name, None)
    if spec is None:
        raise IncompleteModelError(
            f"{directory / MANIFEST}: tensor {shown(name)} is in none of the dense files;"
            " convert the model again"
        )
    if (spec.dtype, spec.shape) != (dtype, shape):
        raise _mismatch(spec, dtype, shape)
    return spec


def _mismatch(spec: TensorSpec, dtype: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"{spec.file}: tensor {shown(spec.name)}: {MANIFEST} wants {dtype} {list(shape)}, found"
        f" {spec.dtype} {list(spec.shape)}"
    )
