import math

import pytest

from colibri.lab.bootstrap import geometric_mean, interval, median, product_interval


def test_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([0.5]) == pytest.approx(0.5)
    assert geometric_mean(iter([1.0, 2.0, 4.0])) == pytest.approx(2.0)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0]])
def test_geometric_mean_refuses(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        geometric_mean(values)


def test_interval_of_seven_rounds() -> None:
    """A resampled median is at most 1 with P = 0.01, at most 2 with P = 0.10: 5 % lies at 2."""
    assert interval([7.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0]) == pytest.approx((2.0, 6.0))


def test_a_wider_level_is_wider() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], level=0.999)
    assert low < 2.0
    assert high > 6.0


def test_interval_without_noise() -> None:
    assert interval([2.0] * 9) == pytest.approx((2.0, 2.0))


def test_interval_is_repeatable() -> None:
    values = [0.7, 0.9, 0.8, 0.85, 0.75, 0.77, 0.81]
    assert interval(values) == interval(values)


def test_interval_of_a_cell() -> None:
    assert product_interval([[1.0] * 7, [4.0] * 7]) == pytest.approx((2.0, 2.0))
    low, high = product_interval([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [4.0] * 7])
    assert low == pytest.approx(math.sqrt(2.0 * 4.0))
    assert high == pytest.approx(math.sqrt(6.0 * 4.0))
