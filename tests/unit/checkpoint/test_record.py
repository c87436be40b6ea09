"""How the parts of a record lie."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.checkpoint.experts import PAGE
from colibri.checkpoint.record import RecordLayout
from colibri.formats import FORMATS, get_format

INT4 = get_format("int4-g64")


def test_gate_and_up_panels_alternate() -> None:
    layout = RecordLayout.uniform(INT4, 64, 24)
    panel = INT4.panel_nbytes(64)
    gate, up, down = (
        np.full(INT4.resident_nbytes(shape), value, np.uint8)
        for shape, value in (((24, 64), 1), ((24, 64), 2), ((64, 24), 3))
    )
    record = layout.assemble(gate, up, down)
    pairs = record[: 6 * panel].reshape(3, 2, panel)
    assert (pairs[:, 0] == 1).all()
    assert (pairs[:, 1] == 2).all()
    start = layout.offsets[2]
    assert start % 64 == 0
    assert (record[start : start + down.size] == 3).all()
    assert not record[start + down.size :].any()


def test_matrices_of_another_size_are_refused() -> None:
    layout = RecordLayout.uniform(INT4, 64, 24)
    gate, down = (
        np.zeros(INT4.nbytes((24, 64)), np.uint8),
        np.zeros(INT4.nbytes((64, 24)), np.uint8),
    )
    with pytest.raises(ValueError, match="up_proj"):
        layout.assemble(gate, np.concatenate([gate, gate]), down)
    with pytest.raises(ValueError, match="gate_proj"):
        layout.split(np.zeros(layout.nbytes - 1, np.uint8))


def test_usual_shapes_fill_whole_pages() -> None:
    for shape, pages in (((2048, 1024), 816), ((2048, 768), 612), ((6144, 2048), 4896)):
        layout = RecordLayout.uniform(INT4, *shape)
        assert layout.nbytes == pages * PAGE
        assert layout.nbytes == 3 * INT4.nbytes(shape)


@settings(max_examples=40, deadline=None)
@given(
    formats=st.tuples(*[st.sampled_from(sorted(FORMATS))] * 3),
    hidden=st.integers(1, 90),
    ffn=st.integers(1, 90),
    biased=st.booleans(),
)
def test_any_layout_splits_into_what_was_assembled(
    formats: tuple[str, str, str], hidden: int, ffn: int, biased: bool
) -> None:
    shapes = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    gate, up, down = map(get_format, formats)
    layout = RecordLayout.of((gate, up, down), shapes, biased=biased)
    assert RecordLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    rng = np.random.default_rng(hidden * 100 + ffn)
    sizes = [fmt.resident_nbytes(s) for fmt, s in zip((gate, up, down), shapes, strict=True)]
    sizes += [4 * rows for rows, _ in shapes] if biased else []
    parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    record = layout.assemble(*parts)
    assert record.size == layout.nbytes
    assert [p.tobytes() for p in layout.split(record)] == [p.tobytes() for p in parts]


def test_biases_are_of_all_parts_or_of_none() -> None:
    whole = RecordLayout.uniform(INT4, 64, 24, biased=True)
    assert whole.biases is not None
    assert all(place % 64 == 0 for place in whole.biases)
    assert whole.biases[2] + 4 * 64 <= whole.nbytes
    described = whole.to_json()
    assert [part["name"] for part in described[3:]] == [
        f"{name}.bias" for name in ("gate_proj", "up_proj", "down_proj")
    ]
    for broken in (described[:5], [*described[:5], {**described[5], "shape": [63]}]):
        with pytest.raises(ValueError, match="biases"):
            RecordLayout.from_json(broken)
