"""Experts in every native storage decode to exactly the numbers that were coded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri.checkpoint.coding import CODINGS
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.experts import ExpertLayer, index_experts
from colibri.checkpoint.quantization import Quantization
from colibri.errors import CheckpointError, ColibriError, UnsupportedModelError
from colibri.formats import BF16, FP8_B32, IntegerFormat, get_format
from tests.unit.checkpoint.files import census, write

E, F, D = 3, 64, 96
P = "model.layers.0.mlp.experts"
SHAPES = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
Weights = dict[str, np.ndarray]  # [E, rows, columns] of each part, what the codes stand for
Tensors = dict[str, np.ndarray]
E4M3, E8M0 = np.dtype([("F8_E4M3", "u1")]), np.dtype([("F8_E8M0", "u1")])


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Codes two to a byte, scale bytes, and their numbers."""
    table = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = rng.integers(0, 16, shape, np.uint8)
    scales = rng.integers(110, 140, (*shape[:-1], shape[-1] // 32), np.uint8)
    wide = np.repeat(np.ldexp(np.float32(1), scales.astype(int) - 127), 32, axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales, table[codes] * wide


def int4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Words of eight codes, bfloat16 scales (some below float16), and their numbers."""
    codes = rng.integers(0, 16, shape, np.uint8)
    sizes = 10.0 ** rng.uniform(-9, 1, (*shape[:-1], shape[-1] // 32))
    scales = BF16.from_float32(sizes.astype(np.float32))
    packed = np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4).view("<i4")
    wide = np.repeat(BF16.to_float32(scales), 32, axis=-1)
    return packed, scales, (codes.astype(np.float32) - 8) * wide


def deepseek_fp4(rng: np.random.Generator) -> tuple[Tensors, Weights]:
    return _each(rng, mxfp4, (".weight", ".scale"), lambda c: c.view("i1"), lambda s: s.view(E8M0))


def packed_mxfp4(rng: np.random.Generator) -> tuple[Tensors, Weights]:
    return _each(rng, mxfp4, (".weight_packed", ".weight_scale"))


def packed_int4(rng: np.random.Generator) -> tuple[Tensors, Weights]:
    return _each(rng, int4, (".weight_packed", ".weight_scale"))


def _each(
    rng: np.random.Generator,
    code: Callable[..., tuple[np.ndarray, ...]],
    tails: tuple[str, str],
    *views: Callable[[np.ndarray], np.ndarray],
) -> tuple[Tensors, Weights]:
    tensors, weights = {}, {}
    for name, shape in SHAPES.items():
        *stored, weights[name] = code(rng, (E, *shape))
        for array, tail, view in zip(stored, tails, views or (np.asarray,) * 2, strict=True):
            for expert in range(E):
                tensors[f"{P}.{expert}.{name}{tail}"] = view(np.ascontiguousarray(array[expert]))
    return tensors, weights


def fp8(rng: np.random.Generator) -> tuple[Tensors, Weights]:
    """Blocks of 64 x 32, the last ones short; scales of bfloat16."""
    tensors, weights = {}, {name: np.empty((E, *shape), "f4") for name, shape in SHAPES.items()}
    for name, (rows, columns) in SHAPES.items():
        for expert in range(E):
            codes = rng.integers(0, 127, (rows, columns), np.uint8) | rng.choice([0, 128], 1)[0]
            codes = codes.astype(np.uint8)
            sizes = rng.random((-(-rows // 64), -(-columns // 32)), np.float32)
            scales = BF16.from_float32(sizes)
            fine = np.repeat(BF16.to_float32(scales), 2, axis=0)[: -(-rows // 32)]
            weights[name][expert] = FP8_B32.decode(FP8_B32.join(codes, fine), (rows, columns))
            tensors[f"{P}.{expert}.{name}.weight"] = codes.view(E4M3)
            tensors[f"{P}.{expert}.{name}.weight_scale_inv"] = scales
    return tensors, weights


def blocks(rng: np.random.Generator) -> tuple[Tensors, Weights]:
    """gpt-oss: all experts in one, rows of gate and up alternate."""
    codes, scales, both = mxfp4(rng, (E, 2 * F, D))
    down, down_scales, numbers = mxfp4(rng, (E, *SHAPES["down_proj"]))
    tensors = {
        f"{P}.gate_up_proj_blocks": codes.reshape(E, 2 * F, D // 32, 16),
        f"{P}.gate_up_proj_scales": scales,
        f"{P}.down_proj_blocks": down.reshape(E, D, 2, 16),
        f"{P}.down_proj_scales": down_scales,
    }
    return tensors, {"gate_proj": both[:, 0::2], "up_proj": both[:, 1::2], "down_proj": numbers}


def transposed(rng: np.random.Generator) -> tuple[Tensors, Weights]:
    """gpt-oss in floats: `[E, in, out]`, columns of gate and up alternate."""
    both = rng.standard_normal((E, D, 2 * F)).astype("f4")
    down = rng.standard_normal((E, F, D)).astype("f4")
    gate, up = both[:, :, 0::2].transpose(0, 2, 1), both[:, :, 1::2].transpose(0, 2, 1)
    tensors = {f"{P}.gate_up_proj": both, f"{P}.down_proj": down}
    return tensors, {"gate_proj": gate, "up_proj": up, "down_proj": down.transpose(0, 2, 1)}


CASES = (deepseek_fp4, packed_mxfp4, packed_int4, fp8, blocks, transposed)
QUANTIZATION = Quantization(block=(64, 32), group=32)


def request(made: Callable[..., object]) -> ExpertLayer:
    fused = made in (blocks, transposed)
    return ExpertLayer(0, P, E, D, F, transposed=fused, interleaved=fused)


@pytest.mark.parametrize("made", CASES, ids=lambda made: made.__name__)
def test_numbers_are_exact(made: Callable[..., tuple[Tensors, Weights]], tmp_path: Path) -> None:
    tensors, weights = made(np.random.default_rng(4))
    found = census(write(tmp_path / "x.safetensors", tensors))
    index = index_experts(found, [request(made)], QUANTIZATION)
    found.finish(())
    layout = index.layers[0]
    for expert in range(E):
        data = read_expert(index, layout, expert)
        for part, resident in zip(layout.parts, data, strict=True):
            numbers = part.format.decode(resident, (part.rows, part.columns))
            assert np.array_equal(numbers, weights[part.name][expert]), part.name


@pytest.mark.parametrize("fmt", CODINGS.values(), ids=str)
@pytest.mark.parametrize("made", [fp8, transposed], ids=lambda made: made.__name__)
def test_experts_are_rounded_as_they_land(
    made: Callable[..., tuple[Tensors, Weights]], fmt: IntegerFormat, tmp_path: Path
) -> None:
    tensors, weights = made(np.random.default_rng(4))
    found = census(write(tmp_path / "x.safetensors", tensors))
    index = index_experts(found, [request(made)], QUANTIZATION, fmt)
    layout = index.layers[0]
    for expert in range(E):
        data = read_expert(index, layout, expert)
        for part, resident in zip(layout.parts, data, strict=True):
            shape = (part.rows, part.columns)
            wanted = fmt.pack(fmt.encode(weights[part.name][expert]), shape)
            assert resident.tobytes() == wanted.tobytes(), part.name


@pytest.mark.parametrize(
    "made", [deepseek_fp4, packed_int4, blocks], ids=lambda made: made.__name__
)
def test_codes_are_not_rounded_again(
    made: Callable[..., tuple[Tensors, Weights]], tmp_path: Path
) -> None:
    tensors, _ = made(np.random.default_rng(4))
    found = census(write(tmp_path / "x.safetensors", tensors))
    with pytest.raises(UnsupportedModelError, match=r"layer 0: gate_proj is .* a second time"):
        index_experts(found, [request(made)], QUANTIZATION, CODINGS["int8-g64"])


@pytest.mark.parametrize("made", [deepseek_fp4, packed_int4, fp8], ids=lambda made: made.__name__)
@pytest.mark.parametrize("fault", ["no scales", "scale shape", "code shape"])
def test_faults_are_named(
    made: Callable[..., tuple[Tensors, Weights]], fault: str, tmp_path: Path
) -> None:
    tensors, _ = made(np.random.default_rng(4))
    codes, scales = (name for name in tensors if name.startswith(f"{P}.1.up_proj"))
    if fault == "no scales":
        del tensors[scales]
    else:
        name = scales if fault == "scale shape" else codes
        tensors[name] = tensors[name][:, :-1]
    found = census(write(tmp_path / "x.safetensors", tensors))
    with pytest.raises(ColibriError, match=scales if "scale" in fault else codes):
        index_experts(found, [request(made)], QUANTIZATION)


@pytest.mark.parametrize("kind", ["<i8", "<i4"])
@pytest.mark.parametrize("rows", [F, F + 8])
def test_shapes_that_are_told_are_checked(kind: str, rows: int, tmp_path: Path) -> None:
    tensors, _ = packed_int4(np.random.default_rng(4))
    tensors[f"{P}.2.up_proj.weight_shape"] = np.array([rows, D], kind)
    found = census(write(tmp_path / "x.safetensors", tensors))
    if rows == F:
        index_experts(found, [request(packed_int4)], QUANTIZATION)
        assert found.finish(()) == ()
        return
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_shape.* says shape \[72, 96\]"):
        index_experts(found, [request(packed_int4)], QUANTIZATION)


def test_formats_are_those_of_the_storage(tmp_path: Path) -> None:
    wanted = {deepseek_fp4: "mxfp4", packed_int4: "int4-g32-bf16", fp8: "fp8-e4m3-b32"}
    for made, name in wanted.items():
        tensors, _ = made(np.random.default_rng(4))
        found = census(write(tmp_path / f"{name}.safetensors", tensors))
        index = index_experts(found, [request(made)], QUANTIZATION)
        assert {part.format for part in index.layers[0].parts} == {get_format(name)}


def test_biases_land_behind_the_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    tensors, _ = blocks(rng)
    both, down = (rng.standard_normal((E, n)).astype("f4") for n in (2 * F, D))
    tensors |= {f"{P}.gate_up_proj_bias": both, f"{P}.down_proj_bias": down}
    found = census(write(tmp_path / "x.safetensors", tensors))
    biased = ExpertLayer(0, P, E, D, F, transposed=True, interleaved=True, biased=True)
    index = index_experts(found, [biased], QUANTIZATION)
    layout = index.layers[0]
    assert layout.biases is not None
    slot = np.empty(layout.slot_nbytes, np.uint8)
    wanted = (both[:, 0::2], both[:, 1::2], down)
    for expert in range(E):
        pieces = [
            np.fromfile(index.files[0], np.uint8, read.nbytes, offset=read.offset)
            for read in index.reads(0, expert)
        ]
        for step in layout.packings:
            if step.in_slot:
                assert step.run(pieces, slot[step.to :])
        for start, values in zip(layout.biases, wanted, strict=True):
            row = values[expert]
            assert np.array_equal(slot[start : start + row.nbytes].view("f4"), row)
