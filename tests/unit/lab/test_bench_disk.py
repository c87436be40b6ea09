"""Which way of reading `coli bench disk` has remembered."""

from colibri.lab.bench_disk import choose
from colibri.memory.devices import Reading

USUAL, DEEP, LARGE = Reading(), Reading(threads=8), Reading(threads=8, block=4 << 20)
WAYS = [USUAL, DEEP, LARGE]


def test_the_fastest_is_remembered_with_its_speed() -> None:
    assert choose(WAYS, [1e9, 2e9, 1.5e9], 3 << 20) == Reading(threads=8, bytes_per_s=2_000_000_000)


def test_the_default_stays_where_others_are_hardly_faster() -> None:
    assert choose(WAYS, [1e9, 1.04e9, 1e9], 3 << 20) == Reading(bytes_per_s=1_000_000_000)


def test_large_blocks_are_for_records_that_keep_all_threads_busy() -> None:
    rates = [1e9, 1e9, 2e9]
    assert choose(WAYS, rates, 3 << 20).block == USUAL.block
    assert choose(WAYS, rates, 32 << 20) == Reading(
        threads=8, block=4 << 20, bytes_per_s=2_000_000_000
    )
