"""Blocks that a row selects, as positions; and an order of dims that leaves scores as they are."""

import numpy as np
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from colibri.kernels.reference_heads import rotate
from colibri.kernels.reference_shared_key import rotate_trailing
from colibri.nn.block_sparse import BlockIndex, positions_of
from tests.examples import examples
from tests.kernels.builders import gaussian, generator, rope


@given_settings(max_examples=examples(60))
@given(
    ratio=st.sampled_from([1, 2, 4, 16]),
    top_k=st.integers(1, 4),
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_positions(ratio: int, top_k: int, rows: list[int], seed: int) -> None:
    rng = generator(seed)
    blocks, wanted = np.zeros((len(rows), top_k), np.int32), []
    for t, position in enumerate(rows):
        complete = (position + 1) // ratio
        seen = set(range(position + 1))
        if complete > top_k:
            blocks[t] = np.sort(rng.permutation(complete)[:top_k])
            seen = {p for p in seen if p // ratio in blocks[t] or p >= complete * ratio}
        wanted.append(sorted(seen))
    found = positions_of(blocks, np.array(rows, np.int32), ratio)
    assert found.dtype == np.int32
    for row, seen in zip(found.tolist(), wanted, strict=True):
        assert row == seen + [-1] * (len(row) - len(seen))


def test_heads_in_another_order_have_the_same_scores() -> None:
    rng = generator(3)
    index, rotary_dim = BlockIndex(num_heads=3, head_dim=12, budget=8, ratio=2), 8
    order = index.order(rotary_dim)
    assert sorted(order.tolist()) == list(range(12))
    q, k = gaussian(rng, 5, 3, 12), gaussian(rng, 5, 1, 12)
    table = rope(np.arange(5, dtype=np.int32), rotary_dim)
    plain = np.einsum("thd,skd->ths", rotate(q, table, "half"), rotate(k, table, "half"))
    turned = [rotate_trailing(each[..., order], table, rotary_dim) for each in (q, k)]
    np.testing.assert_allclose(np.einsum("thd,skd->ths", *turned), plain, atol=1e-5)
