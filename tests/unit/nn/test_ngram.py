"""Hashed n-grams: rows against the formula with Python's own integers, whatever came before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from colibri.nn.ngram import NGramHash, primes_from, split_mix
from tests.examples import examples

END = 2


def hashed(order: int = 3, heads: int = 2, layer: int = 0) -> NGramHash:
    return NGramHash(
        vocab_size=512,
        order=order,
        heads=heads,
        first_size=97,
        divisor=16,
        layer=layer,
        seed=1234,
        end=END,
    )


def rows_of(layer: NGramHash, tokens: list[int]) -> list[int]:
    """Rows of the last token, in exact integers."""
    found, first = [], 0
    for n in range(2, layer.order + 1):
        mixed, inside = tokens[-1] * layer.multipliers[0], True
        for back in range(1, n):
            token = tokens[-1 - back] if back < len(tokens) else END
            inside = inside and token != END
            mixed ^= (token if inside else END) * layer.multipliers[back]
        assert 0 <= mixed < 1 << 63
        for size in layer.sizes[(n - 2) * layer.heads : (n - 1) * layer.heads].tolist():
            found.append(first + mixed % size)
            first += size
    return found


@given_settings(max_examples=examples(40))
@given(
    tokens=st.lists(st.sampled_from([END, 0, 1, 5, 511]), min_size=1, max_size=12),
    order=st.integers(2, 5),
    heads=st.integers(1, 3),
    layer=st.integers(0, 2),
)
def test_rows(tokens: list[int], order: int, heads: int, layer: int) -> None:
    subject = hashed(order, heads, layer)
    history = np.array([END] * (order - 1) + tokens, np.int64)
    found = subject.rows(history)
    wanted = [rows_of(subject, tokens[: t + 1]) for t in range(len(tokens))]
    np.testing.assert_array_equal(found, wanted)
    assert found.max() < subject.sizes.sum() <= subject.num_rows


def test_what_stands_before_an_end_does_not_count() -> None:
    subject = hashed()
    one, other = ([5, 6, END, 7, 8], [9, 3, END, 7, 8])
    assert rows_of(subject, one) == rows_of(subject, other)
    assert rows_of(subject, [7, 8]) == rows_of(subject, one)


def test_sizes_are_primes_that_go_on_from_layer_to_layer() -> None:
    assert primes_from(97, 4) == (97, 101, 103, 107)
    assert primes_from(2, 4) == (2, 3, 5, 7)
    assert primes_from(20_000_000, 1) == (20_000_003,)
    assert hashed().sizes.tolist() == [97, 101, 103, 107]
    assert hashed(layer=1).sizes.tolist() == [109, 113, 127, 131]
    assert (hashed().num_rows, hashed(layer=1).num_rows) == (416, 480)


def test_split_mix_is_that_of_its_authors() -> None:
    """The first outputs for seed 1234567 of the reference implementation."""
    gamma, state = 0x9E3779B97F4A7C15, 1234567
    assert [split_mix(state + i * gamma) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("vocab_size", [512, 248320])
def test_products_stay_below_the_sign_bit(vocab_size: int) -> None:
    subject = NGramHash(
        vocab_size=vocab_size, order=3, heads=8, first_size=97, divisor=128, layer=3, seed=9, end=0
    )
    assert all(each % 2 and each * (vocab_size - 1) < 1 << 63 for each in subject.multipliers)
