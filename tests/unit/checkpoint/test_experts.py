"""One set of weights in every spelling: the same bytes for each (layer, expert) and part."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.checkpoint.experts import PAGE, ExpertIndex, ExpertLayer, index_experts
from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import TensorSpec
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError
from colibri.formats import FORMATS
from tests.unit.checkpoint.files import Tensors, census, split, write

PREFIX = "model.layers.{}.mlp.experts"
FORMAT_NAMES = {np.dtype("<f4"): "f32", np.dtype("<f2"): "f16", np.dtype("<u2"): "bf16"}
Weights = tuple[np.ndarray, np.ndarray, np.ndarray]  # gate [E, F, D], up [E, F, D], down [E, D, F]


def weights(E: int, F: int, D: int, dtype: str = "<f4", seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    gate, up, down = (rng.integers(0, 1000, shape).astype(dtype) for shape in shapes)
    return gate, up, down


def separate(prefix: str, w: Weights, names: tuple[str, str, str]) -> dict[str, np.ndarray]:
    return {
        f"{prefix}.{expert}.{name}.weight": part[expert]
        for expert in range(len(w[0]))
        for name, part in zip(names, w, strict=True)
    }


def projections(prefix: str, w: Weights) -> dict[str, np.ndarray]:
    return separate(prefix, w, ("gate_proj", "up_proj", "down_proj"))


def numbered(prefix: str, w: Weights) -> dict[str, np.ndarray]:
    return separate(prefix, w, ("w1", "w3", "w2"))


def fused(prefix: str, w: Weights) -> dict[str, np.ndarray]:
    both = np.concatenate(w[:2], axis=1)
    return {f"{prefix}.gate_up_proj": both, f"{prefix}.down_proj": w[2]}


def fused_weight(prefix: str, w: Weights) -> dict[str, np.ndarray]:
    return {f"{name}.weight": array for name, array in fused(prefix, w).items()}


def fused_apart(prefix: str, w: Weights) -> dict[str, np.ndarray]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{prefix}.{name}": part for name, part in zip(names, w, strict=True)}


def fused_apart_weight(prefix: str, w: Weights) -> dict[str, np.ndarray]:
    return {f"{name}.weight": array for name, array in fused_apart(prefix, w).items()}


Spelled = Callable[[str, Weights], dict[str, np.ndarray]]
SPELLINGS = (projections, numbered, fused, fused_weight, fused_apart, fused_apart_weight)


def request(layer: int, w: Weights) -> ExpertLayer:
    E, F, D = w[0].shape
    return ExpertLayer(layer, PREFIX.format(layer), E, D, F)


def index(folder: Path, layers: list[tuple[Spelled, Weights]], shards: int, blanks: int = 0):
    """Write layers, each in its spelling, and index them."""
    tensors: Tensors = {
        name: array
        for layer, (spelled, w) in enumerate(layers)
        for name, array in spelled(PREFIX.format(layer), w).items()
    }
    dealt = [shard for shard in split(tensors, shards) if shard]
    paths = [write(folder / f"{i}.safetensors", shard, blanks) for i, shard in enumerate(dealt)]
    found = census(*paths)
    experts = index_experts(found, [request(layer, w) for layer, (_, w) in enumerate(layers)])
    found.finish(())
    return experts


def load_slot(experts: ExpertIndex, layer: int, expert: int) -> np.ndarray:
    """What a direct reader leaves in a slot: for each piece the pages that enclose it."""
    slot = np.full(experts.layers[experts.position[layer]].slot_nbytes, 0xAA, np.uint8)
    for read in experts.reads(layer, expert):
        first = read.offset // PAGE * PAGE
        last = -(-(read.offset + read.nbytes) // PAGE) * PAGE
        content = experts.files[read.file].read_bytes()[first:last]
        assert read.region + last - first <= len(slot)
        slot[read.region : read.region + len(content)] = np.frombuffer(content, np.uint8)
    return slot


def check_parts(experts: ExpertIndex, layer: int, w: Weights) -> None:
    """Every part of every expert lies where the index says, with the bytes of the weights."""
    layout = experts.layers[experts.position[layer]]
    assert layout.num_experts == len(w[0])
    assert layout.slot_nbytes % PAGE == 0
    for expert in range(len(w[0])):
        slot = load_slot(experts, layer, expert)
        offsets = experts.part_offsets(layer, expert)
        for part, offset, array in zip(layout.parts, offsets, w, strict=True):
            matrix = array[expert]
            assert (part.rows, part.columns) == matrix.shape
            assert part.format is FORMATS[FORMAT_NAMES[matrix.dtype]]
            assert part.panel_stride == 8 * part.columns * matrix.itemsize
            assert slot[offset : offset + matrix.nbytes].tobytes() == matrix.tobytes()


@given(
    E=st.integers(1, 5),
    F=st.integers(1, 40),
    D=st.integers(1, 40),
    dtype=st.sampled_from(list(FORMAT_NAMES)),
    spelled=st.sampled_from(SPELLINGS),
    shards=st.integers(1, 3),
    blanks=st.integers(0, 5000),
)
def test_spellings(
    E: int,
    F: int,
    D: int,
    dtype: np.dtype,
    spelled: Spelled,
    shards: int,
    blanks: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    w = weights(E, F, D, dtype)
    experts = index(tmp_path_factory.mktemp("shards"), [(spelled, w)], shards, blanks)
    check_parts(experts, 0, w)
    assert experts.layers[0].record_nbytes == sum(part[0].nbytes for part in w)
    assert experts.crc is None


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize(("F", "D"), [(4, 8), (8, 8), (16, 8)])
def test_shapes_that_could_be_mistaken(spelled: Spelled, F: int, D: int, tmp_path: Path) -> None:
    """2F = D, F = D and E = F: only the name tells which way a matrix lies."""
    w = weights(F, F, D)
    check_parts(index(tmp_path, [(spelled, w)], 1), 0, w)


def test_layers_of_different_spelling_shape_and_type(tmp_path: Path) -> None:
    layers = [
        (spelled, weights(2 + i, 5 + i, 7, list(FORMAT_NAMES)[i % 3], seed=i))
        for i, spelled in enumerate(SPELLINGS)
    ]
    experts = index(tmp_path, layers, 3)
    for layer, (_, w) in enumerate(layers):
        check_parts(experts, layer, w)
    assert experts.file.shape == experts.offset.shape == experts.nbytes.shape == (6, 7, 3)
    assert experts.file[0, 2:].max() == -1
    assert not experts.nbytes[0, 2:].any()


@pytest.mark.parametrize("spelled", [projections, fused])
def test_more_than_256_experts(spelled: Spelled, tmp_path: Path) -> None:
    w = weights(300, 2, 3)
    check_parts(index(tmp_path, [(spelled, w)], 2), 0, w)


def test_larger_than_a_page(tmp_path: Path) -> None:
    w = weights(2, 33, 65)
    experts = index(tmp_path, [(fused, w)], 1, blanks=1)
    check_parts(experts, 0, w)
    layout = experts.layers[0]
    assert layout.regions == (0, 5 * PAGE + PAGE)  # 2 * 33 * 65 * 4 bytes are 4.2 pages
    assert layout.slot_nbytes == 6 * PAGE + 3 * PAGE + PAGE
    assert layout.part_pieces == (0, 0, 1)
    assert layout.part_deltas == (0, 33 * 65 * 4, 0)


@given(E=st.integers(1, 4), F=st.integers(1, 600), D=st.integers(1, 9), start=st.integers(0, 9000))
def test_regions_hold_the_pages_of_any_piece(E: int, F: int, D: int, start: int) -> None:
    prefix = PREFIX.format(0)
    shape, nbytes = (E, F, D), E * F * D * 4
    tensors = {
        f"{prefix}.{name}": TensorSpec(name, "F32", shape, Path("x"), start + i * nbytes, nbytes)
        for i, name in enumerate(("gate_proj", "up_proj"))
    }
    down = TensorSpec("down", "F32", (E, D, F), Path("x"), start + 2 * nbytes, nbytes)
    found = Census({**tensors, f"{prefix}.down_proj": down})
    experts = index_experts(found, [ExpertLayer(0, prefix, E, D, F)])
    for expert in range(E):
        reads = experts.reads(0, expert)
        ends = [
            read.region + -(-(read.offset % PAGE + read.nbytes) // PAGE) * PAGE for read in reads
        ]
        limits = [read.region for read in reads[1:]] + [experts.layers[0].slot_nbytes]
        assert all(end <= limit for end, limit in zip(ends, limits, strict=True))
        assert all(a.region < b.region for a, b in pairwise(reads))


def test_layers_are_numbered_as_in_the_model(tmp_path: Path) -> None:
    w = weights(2, 3, 4)
    found = census(write(tmp_path / "x.safetensors", projections(PREFIX.format(7), w)))
    experts = index_experts(found, [request(7, w)])
    assert experts.position == {7: 0}
    check_parts(experts, 7, w)
    with pytest.raises(KeyError):
        experts.reads(0, 0)
    for expert in (-1, 2):
        with pytest.raises(IndexError, match="layer 7 has 2 experts"):
            experts.reads(7, expert)


def test_no_experts_at_all() -> None:
    experts = index_experts(Census({}), [])
    assert experts.layers == ()
    assert experts.file.shape == (0, 0, 0)


W = weights(3, 4, 8)
A, B, FUSED, APART = (f(PREFIX.format(0), W) for f in (projections, numbered, fused, fused_apart))
P = PREFIX.format(0)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: array for name, array in tensors.items() if name not in names}


REFUSED = {
    "two spellings": (A | B, CheckpointError, "stored twice or in mixed spellings"),
    "both fused": (FUSED | APART, CheckpointError, "stored twice or in mixed spellings"),
    "fused and not": (A | FUSED, CheckpointError, "stored twice or in mixed spellings"),
    "one expert spelled otherwise": (
        {n: a for n, a in A.items() if ".1." not in n} | {n: a for n, a in B.items() if ".1." in n},
        CheckpointError,
        "mixed spellings",
    ),
    "fused down beside separate gates": (
        {n: a for n, a in A.items() if "down" not in n} | {f"{P}.down_proj": W[2]},
        IncompleteModelError,
        r"found 6 of 9 tensors.*0\.down_proj.*not mixed",
    ),
    "with and without .weight": (
        FUSED | {f"{P}.down_proj.weight": W[2]},
        CheckpointError,
        r"'.*down_proj' and '.*down_proj\.weight' mean the same",
    ),
    "nothing": ({}, IncompleteModelError, r"layer 0: wanted 3 experts under '.*experts\.'.*0 tens"),
    "another spelling": (
        {f"{P}.{e}.linear.weight": W[0][e] for e in range(3)},
        IncompleteModelError,
        "no gate among the 3 tensors",
    ),
    "no up": (without(APART, f"{P}.up_proj"), IncompleteModelError, r"found 2 of 3 .*'.*up_proj'"),
    "no fused down": (without(FUSED, f"{P}.down_proj"), IncompleteModelError, r"found 1 of 2"),
    "transposed": (
        FUSED | {f"{P}.down_proj": W[2].transpose(0, 2, 1)},
        UnsupportedModelError,
        r"'.*down_proj': wanted \[3, 8, 4\], found the transposed \[3, 4, 8\]",
    ),
    "fewer experts": (
        {name: array[:2] for name, array in FUSED.items()},
        CheckpointError,
        r"gate_up_proj': wanted shape \[3, 8, 8\], found \[2, 8, 8\]",
    ),
    "a wrong shape": (
        A | {f"{P}.1.up_proj.weight": W[2][1]},
        CheckpointError,
        r"1\.up_proj\.weight': wanted shape \[4, 8\], found \[8, 4\]",
    ),
    "codes": (
        A | {f"{P}.2.up_proj.weight": W[1][2].astype("u1")},
        UnsupportedModelError,
        r"2\.up_proj\.weight': wanted dtype F32 as in the others, found U8",
    ),
    "two types": (
        A | {f"{P}.2.up_proj.weight": W[1][2].astype("<f2")},
        UnsupportedModelError,
        r"2\.up_proj\.weight': wanted dtype F32 as in the others, found F16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, error, message = REFUSED[case]
    found = census(write(tmp_path / "x.safetensors", tensors))
    with pytest.raises(error, match=message):
        index_experts(found, [request(0, W)])


def test_what_no_spelling_uses_is_left_for_the_census(tmp_path: Path) -> None:
    for i, extra in enumerate((f"{P}.3.up_proj.weight", f"{P}.0.up_proj.bias", f"{P}.0.w3.weight")):
        path = write(tmp_path / f"{i}.safetensors", A | {extra: W[1][0]})
        found = census(path)
        index_experts(found, [request(0, W)])
        with pytest.raises(CheckpointError, match=f"1 of 10 tensors .*{extra}"):
            found.finish(())
