"""A container gives back what was written."""

from pathlib import Path

import numpy as np
import pytest
import safetensors

from colibri.checkpoint.container import open_container
from colibri.checkpoint.container_writer import ContainerWriter
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.experts import PAGE, ExpertLayer
from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, IncompleteModelError
from colibri.formats import F16, F32, FORMATS, Format
from tests.unit.checkpoint.containers import (
    CONFIG,
    INT8,
    LAYERS,
    REQUESTS,
    SOURCE,
    D,
    E,
    F,
    matrices,
    opened,
    write_container,
)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_experts_come_back_bit_for_bit(fmt: Format, tmp_path: Path) -> None:
    index = write_container(tmp_path, fmt).expert_index(REQUESTS)
    for layout in index.layers:
        for expert in range(E):
            wanted = [fmt.pack(fmt.encode(m), m.shape) for m in matrices(layout.layer, expert)]
            found = read_expert(index, layout, expert)
            assert [a.tobytes() for a in found] == [b.tobytes() for b in wanted]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_a_record_is_one_aligned_read_with_its_checksum(fmt: Format, tmp_path: Path) -> None:
    index = write_container(tmp_path, fmt).expert_index(REQUESTS)
    assert index.crc is not None
    for row, layout in enumerate(index.layers):
        for expert in range(E):
            (read,) = index.reads(layout.layer, expert)
            assert read.offset % PAGE == read.nbytes % PAGE == read.region == 0
            assert read.nbytes == layout.slot_nbytes == layout.record_nbytes
            path = index.files[read.file]
            record = np.fromfile(path, np.uint8, read.nbytes, offset=read.offset)
            assert crc32c(record) == index.crc[row, expert]


def test_dense_tensors_come_back(pristine: Path) -> None:
    container, checkpoint = opened(pristine), Checkpoint.open(pristine)
    assert container.family == "any"
    assert container.coded == {"lm_head.weight": (INT8, (16, D))}
    assert container.dense["model.norm.weight"] == (F32, (D,))
    spec = checkpoint.tensors["model.embed_tokens.weight"]
    assert (spec.dtype, spec.shape) == ("BF16", (16, D))
    assert checkpoint.tensors["lm_head.weight"].nbytes == INT8.resident_nbytes((16, D))


def test_the_official_reader_opens_every_file(pristine: Path) -> None:
    names: list[str] = []
    for path in sorted(pristine.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name != "model.embed_tokens.weight":  # NumPy has no bfloat16
                    assert file.get_tensor(name).size
                names.append(name)
    experts = {f"experts.{layer}.{expert}" for layer in LAYERS for expert in range(E)}
    tables = {f"crc32c.{layer}" for layer in LAYERS}
    dense = {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"}
    assert len(names) == len(set(names))
    assert set(names) == experts | tables | dense


def test_a_full_dense_file_is_followed_by_another(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path, family="any", source=SOURCE)
    names = [f"model.layers.{i}.{'x' * 400}.weight" for i in range(200)]
    for i, name in enumerate(names):
        writer.dense(name, np.full(3, i, np.float32), F16)
    writer.finish(CONFIG)
    assert len(list(tmp_path.glob("dense-*.safetensors"))) > 1
    assert list(opened(tmp_path).dense) == names


def test_a_directory_without_manifest_is_no_container(tmp_path: Path) -> None:
    assert open_container(tmp_path) is None


def test_requests_must_fit(pristine: Path) -> None:
    container, first = opened(pristine), REQUESTS[0]
    more = ExpertLayer(1, first.prefix, E + 1, D, F)
    with pytest.raises(IncompleteModelError, match=r"found 3 of 4 experts of layer 1"):
        container.expert_index([more, REQUESTS[1]])
    with pytest.raises(IncompleteModelError, match=r"found 0 of 3 experts of layer 7"):
        container.expert_index([*REQUESTS, ExpertLayer(7, first.prefix, E, D, F)])
    with pytest.raises(CheckpointError, match=r"config\.json wants"):
        container.expert_index([ExpertLayer(1, first.prefix, E, D, F + 8), REQUESTS[1]])
    with pytest.raises(CheckpointError, match="layer 4"):
        container.expert_index([first])
