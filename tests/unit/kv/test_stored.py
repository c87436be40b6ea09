"""Attention state on disk: whole or not there, and never that of other ids."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import F32
from colibri.kv import KVPool, KVState, Plane, StateShape, Stored, StoredStates, common_length
from tests.examples import examples

RECURRENT = {False: 0, True: 24}
IDS = np.arange(3, 203, dtype=np.int32)


def new_state(recurrent: bool, length: int, seed: int = 0) -> KVState:
    """A state of random bytes."""
    pool = KVPool([StateShape((Plane(1, 4),), RECURRENT[recurrent])], 8, F32, 4 if recurrent else 0)
    state = pool.open_state()
    state.reserve(length)
    random = np.random.RandomState(seed)
    for part in bytes_of(state, length):
        part[:] = random.randint(0, 256, part.size)
    return state


def bytes_of(state: KVState, length: int) -> list[np.ndarray]:
    blocks = [state.block(i) for i in range(-(-length // 64))]
    cell = state.cells()[length]
    return blocks if cell is None else [*blocks, cell]


def save(states: StoredStates, state: KVState, ids: np.ndarray) -> None:
    for end, path in states.missing(ids, [len(ids)]):
        whole = end // 64
        if path.suffix == ".block":
            states.write(path, ids[end - 64 : end], [state.block(whole - 1)])
        else:
            cell = state.cells()[end]
            parts = [state.block(whole)] if end % 64 else []
            tail = ids[whole * 64 : end]
            states.write(path, tail, parts if cell is None else [*parts, cell])


def load(states: StoredStates, found: Stored, state: KVState) -> Path | None:
    """Read everything up to the first broken file, and return that."""
    read = (states.load(found, index, state) for index in range(found.num_files))
    return next((path for path in read if path is not None), None)


@pytest.fixture(params=[False, True], ids=["blocks", "recurrent"])
def recurrent(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def opened(path: Path, recurrent: bool, most: int = 1 << 30) -> StoredStates:
    return StoredStates(path, recurrent, most)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_what_was_saved_comes_back(tmp_path: Path, recurrent: bool, length: int) -> None:
    state = new_state(recurrent, length)
    save(opened(tmp_path, recurrent), state, IDS[:length])
    states = opened(tmp_path, recurrent)  # another run
    found = states.find(IDS)
    assert found is not None
    assert found.length == length
    read = new_state(recurrent, length, seed=1)
    assert load(states, found, read) is None
    for ours, theirs in zip(bytes_of(read, length), bytes_of(state, length), strict=True):
        assert np.array_equal(ours, theirs)
    assert list(states.missing(IDS[:length], [length])) == []


def test_the_longest_beginning_is_found(tmp_path: Path) -> None:
    states = opened(tmp_path, False)
    save(states, new_state(False, 150), IDS[:150])
    other = np.concatenate([IDS[:140], IDS[:30]])
    found = states.find(other)
    assert found is not None
    assert (found.length, len(found.blocks)) == (140, 2)
    assert states.find(other[1:]) is None
    before = len(list(tmp_path.iterdir()))
    save(states, new_state(False, 170), other)
    assert len(list(tmp_path.iterdir())) == before + 1  # the two blocks are shared


def test_recurrent_state_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    states = opened(tmp_path, True)
    save(states, new_state(True, 100), IDS[:100])
    assert states.find(IDS[:99]) is None
    save(states, new_state(True, 64), IDS[:64])
    found = states.find(IDS[:99])
    assert found is not None
    assert found.length == 64


@given(st.data())
@settings(max_examples=examples(60))
def test_damage_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any file cut anywhere, or any byte changed: nothing is believed that was not saved."""
    folder, recurrent = tmp_path_factory.mktemp("stored"), data.draw(st.booleans())
    state = new_state(recurrent, 100)
    save(opened(folder, recurrent), state, IDS[:100])
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(whole[:at] + (b"" if cut else bytes([whole[at] ^ 1]) + whole[at + 1 :]))
    states = opened(folder, recurrent)
    while (found := states.find(IDS)) is not None:
        read = new_state(recurrent, found.length, seed=1)
        broken = load(states, found, read)
        if broken is None:
            for ours, theirs in zip(
                bytes_of(read, found.length)[: found.length // 64],
                bytes_of(state, 100),
                strict=False,
            ):
                assert np.array_equal(ours, theirs)
            break
        assert broken == path
        assert not path.exists()


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    states = opened(tmp_path, False)
    save(states, new_state(False, 64), IDS[:64])
    one = states.num_bytes
    states = opened(tmp_path, False, most=3 * one)
    for start in range(1, 4):
        if start == 3:
            assert states.find(IDS[:64]) is not None
            assert list(states.missing(IDS[:64], [])) == []  # used again
        save(states, new_state(False, 64), IDS[start : start + 64])
    assert states.num_bytes == 3 * one == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert [states.find(IDS[n : n + 64]) is not None for n in range(4)] == [True, False, True, True]


def test_a_file_that_went_is_missed_no_longer(tmp_path: Path) -> None:
    states = opened(tmp_path, False)
    save(states, new_state(False, 64), IDS[:64])
    for path in tmp_path.iterdir():
        path.unlink()
    found = states.find(IDS)
    assert found is not None
    assert load(states, found, new_state(False, 64)) == found.blocks[0]
    assert states.find(IDS) is None


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = opened(tmp_path, False)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save(states, new_state(False, 64), IDS[:64])
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".part-old", tmp_path / ".part-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert opened(tmp_path, False).num_bytes == 0
    assert (old.exists(), new.exists()) == (False, True)


SHORT = st.lists(st.integers(0, 2), max_size=12)


@given(SHORT, SHORT)
@settings(max_examples=examples(100))
def test_common_length(first: list[int], second: list[int]) -> None:
    found = common_length(np.asarray(first, np.int32), np.asarray(second, np.int32))
    assert first[:found] == second[:found]
    assert found in (len(first), len(second)) or first[found] != second[found]
