"""Tables of ids: whole numbers that float32 holds exactly, or a refusal."""

import numpy as np
import pytest

from colibri.errors import NumericsError
from colibri.formats import FORMATS, I32, I64, ID_FORMATS, WholeFormat

BOTH = pytest.mark.parametrize("fmt", [I32, I64], ids=lambda f: f.name)


@BOTH
def test_whole_numbers_come_back(fmt: WholeFormat) -> None:
    values = np.array([[0, 1, 255], [-3, 1 << 24, 7]], np.float32)
    stored = fmt.encode(values)
    assert stored.size == fmt.nbytes((2, 3)) == fmt.resident_nbytes((2, 3))
    assert fmt.panel_nbytes(3) == 4 * fmt.nbytes((2, 3))
    np.testing.assert_array_equal(stored.view(fmt.dtype).reshape(2, 3), values)
    np.testing.assert_array_equal(fmt.decode(fmt.pack(stored, (2, 3)), (2, 3)), values)
    assert fmt.scans((2, 3), 0) == []
    assert fmt.is_plain
    assert not fmt.is_coded


@BOTH
@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, 2.0**25])
def test_other_numbers_are_refused(fmt: WholeFormat, value: float) -> None:
    with pytest.raises(NumericsError, match=f"{fmt.name} holds whole numbers"):
        fmt.encode(np.array([[value]], np.float32))


def test_what_float32_would_round_is_read_as_nan() -> None:
    stored = np.array([1 << 24, (1 << 24) + 1, -(1 << 40)], np.int64).view(np.uint8)
    decoded = I64.decode(stored, (1, 3))[0]
    assert decoded[0] == 1 << 24
    assert np.isnan(decoded[1:]).all()


def test_they_are_no_formats_of_weights() -> None:
    assert {"i32": I32, "i64": I64} == ID_FORMATS
    assert not ID_FORMATS.keys() & FORMATS.keys()
