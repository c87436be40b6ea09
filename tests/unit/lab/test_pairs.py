import numpy as np
import pytest

from colibri.lab.pairs import Ring, alternate, items_for


def test_turns_alternate_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str, rate: float) -> float:
        order.append(name)
        return rate + order.count(name)

    rates = alternate([lambda: turn("a", 10.0), lambda: turn("b", 20.0)], rounds=3)
    assert order == ["a", "b"] * 4
    np.testing.assert_array_equal(rates, [[12, 22], [13, 23], [14, 24]])


def test_ring_goes_on_where_it_stopped() -> None:
    ring = Ring(5)
    assert ring.take(2) == [(0, 2)]
    assert ring.take(2) == [(2, 4)]
    assert ring.take(3) == [(4, 5), (0, 2)]
    assert ring.take(3) == [(2, 5)]
    assert ring.take(9) == [(0, 5)]


@pytest.mark.parametrize(("each", "wanted"), [(0.01, 10), (0.001, 100), (1e-9, 1000), (3.0, 1)])
def test_items_for(each: float, wanted: int) -> None:
    assert items_for(0.1, lambda num: num * each, count=1000) == wanted
