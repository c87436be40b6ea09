import numpy as np

from colibri.memory.heat import HALF_LIFE, Heat, added, warm_order


def test_uses_are_counted_until_they_are_taken() -> None:
    heat = Heat(4)
    for n in range(1300):
        heat.touch(np.array([n % 2, 2]))
    assert heat.taken().tolist() == [650, 650, 1300, 0]
    heat.touch(np.array([3]))
    assert heat.taken().tolist() == [0, 0, 0, 1]
    assert not heat.taken().any()


def test_old_uses_fade() -> None:
    counts, uses = np.array([[8.0, 0.0]]), np.array([[0, int(2 * HALF_LIFE)]])
    assert np.allclose(added(counts, uses), [[4.0, 2 * HALF_LIFE]])
    assert np.array_equal(added(counts, np.zeros((1, 2), int)), counts)


def order(counts: np.ndarray, rows: tuple[int, ...], n: int) -> list[tuple[int, list[int]]]:
    sizes = [3 if row else 2 for row in rows]
    return [(row, experts.tolist()) for row, experts in warm_order(counts, rows, sizes, n)]


def test_the_hottest_of_some_layers_in_order() -> None:
    counts = np.array([[0.0, 5, 0], [9, 9, 9], [7, 0, 6]])
    assert order(counts, (0, 2), 3) == [(0, [1]), (2, [0, 2])]
    assert order(counts, (0, 2), 4) == [(2, [0]), (0, [1]), (2, [2])]  # the first quarter first
    assert not order(np.zeros((2, 3)), (0, 1), 3)  # cold ones are not read


def test_where_all_fit_the_cold_ones_come_last() -> None:
    counts = np.array([[0.0, 5, 0], [9, 9, 9], [7, 0, 6]])
    assert order(counts, (0, 2), 5) == [(2, [0]), (0, [0, 1]), (2, [1, 2])]
    assert order(np.zeros((3, 3)), (0, 1), 9) == [(0, [0, 1]), (1, [0, 1, 2])]
