"""Dense matrices that are rounded on their way into memory have the bits of their format."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.checkpoint import coding
from colibri.checkpoint.coding import CODINGS, NO_CODING, Coding, FloatMatrix, require_exact
from colibri.checkpoint.divide import Division, divide
from colibri.checkpoint.quantization import Quantization
from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.storage import take_matrix
from colibri.errors import NumericsError, SettingsError, UnsupportedModelError
from colibri.formats import BF16, F16, F32, FP8_B32, MXFP4, IntegerFormat
from tests.examples import examples
from tests.unit.checkpoint.files import census, write

E4M3 = np.dtype([("F8_E4M3", "u1")])
each_coding = pytest.mark.parametrize("fmt", CODINGS.values(), ids=str)
shapes = st.tuples(st.integers(1, 70), st.integers(1, 80))


def in_file(path: Path, data: np.ndarray, dtype: str) -> TensorSpec:
    """Bytes behind others."""
    path.write_bytes(b"\xaa" * 24 + data.tobytes())
    return TensorSpec("x.weight", dtype, data.shape, path, 24, data.nbytes)


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of the fewest rows."""
    monkeypatch.setattr(coding, "_STRIP_NBYTES", 1)


@pytest.mark.usefixtures("strips")
@each_coding
@settings(max_examples=examples(12))
@given(shapes, st.sampled_from([F32, F16, BF16]), st.integers(1, 3), st.integers(0, 99))
def test_floats(
    fmt: IntegerFormat,
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int],
    stored: object,
    threads: int,
    seed: int,
) -> None:
    assert stored in (F32, F16, BF16)
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    items = stored.from_float32(values)
    spec = in_file(tmp_path_factory.mktemp("x") / "x", items, stored.name.upper())
    out = np.full(fmt.resident_nbytes(shape), 0xAA, np.uint8)
    FloatMatrix.of(stored, shape, spec, None).encode(fmt, out, threads)
    wanted = fmt.pack(fmt.encode(stored.to_float32(items)), shape)
    assert out.tobytes() == wanted.tobytes()


@pytest.mark.usefixtures("strips")
@each_coding
def test_rows_that_take_turns_with_others(fmt: IntegerFormat, tmp_path: Path) -> None:
    whole = np.random.default_rng(1).standard_normal((40, 64), np.float32)
    spec = in_file(tmp_path / "x", whole, "F32")
    rule = Division("x", ("gate", "up"))
    for name, part in divide({"x": spec}, [rule]).items():
        out = np.full(fmt.resident_nbytes((20, 64)), 0xAA, np.uint8)
        FloatMatrix.of(F32, (20, 64), part, None).encode(fmt, out, 2)
        wanted = fmt.pack(fmt.encode(whole[("gate", "up").index(name) :: 2]), (20, 64))
        assert out.tobytes() == wanted.tobytes()


@pytest.mark.usefixtures("strips")
@each_coding
@pytest.mark.parametrize("rows", [1, 40, 100])
def test_fp8_as_published_and_in_a_container(fmt: IntegerFormat, rows: int, tmp_path: Path) -> None:
    """Blocks of 96 x 32 in the checkpoint, 32 x 32 where resident."""
    rng, shape = np.random.default_rng(rows), (rows, 70)
    codes = rng.integers(0, 127, shape, np.uint8)
    scales = rng.random((-(-rows // 96), 3), np.float32)
    fine = np.repeat(scales, 3, axis=0)[: -(-rows // 32)]
    resident = FP8_B32.join(codes, fine)
    wanted = fmt.pack(fmt.encode(FP8_B32.decode(resident, shape)), shape)
    found = census(
        write(tmp_path / "x", {"x.weight": codes.view(E4M3), "x.weight_scale_inv": scales})
    )
    matrix = take_matrix(found, "x.weight", shape, Quantization(block=(96, 32)))
    assert matrix is not None
    kept = in_file(tmp_path / "y", resident, "U8")
    for source in (
        FloatMatrix.of(FP8_B32, shape, matrix.codes, matrix),
        FloatMatrix.of(FP8_B32, shape, kept, None),
    ):
        out = np.full(fmt.resident_nbytes(shape), 0xAA, np.uint8)
        source.encode(fmt, out, 2)
        assert out.tobytes() == wanted.tobytes()


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    values = np.ones((20, 64), np.float32)
    values[17, 3] = np.nan
    spec = in_file(tmp_path / "x", values, "F32")
    fmt = CODINGS["int8-g64"]
    out = np.empty(fmt.resident_nbytes(values.shape), np.uint8)
    with pytest.raises(NumericsError, match=r"x\.weight.*not finite"):
        FloatMatrix.of(F32, (20, 64), spec, None).encode(fmt, out, 1)


def test_formats_are_named() -> None:
    assert Coding.named(None, None) == NO_CODING
    assert Coding.named("int8-g64", "int4-g32") == (CODINGS["int8-g64"], CODINGS["int4-g32"])
    for name in ("bf16", "mxfp4", "int4-g64-bf16", "int4"):
        with pytest.raises(SettingsError, match=f"experts is {name!r}: it must be"):
            Coding.named(None, name)


def test_codes_stay_or_become_wider() -> None:
    int4 = CODINGS["int4-g64"]
    for old, new in ((F32, int4), (FP8_B32, int4), (int4, int4), (int4, F32), (MXFP4, F32)):
        require_exact(old, new, "x")
    for old, new in ((int4, CODINGS["int8-g64"]), (MXFP4, int4)):
        with pytest.raises(UnsupportedModelError, match=r"x is .* a second time"):
            require_exact(old, new, "x")
