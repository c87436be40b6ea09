import numpy as np
import pytest

from colibri.engine.session import Session
from colibri.engine.teacher_forcing import teacher_forced
from colibri.errors import Cancelled, RequestError
from tests.unit.engine.counter import CounterModel

IDS = [7, 3, 9, 200, 1, 5, 80, 6, 6, 2]


def open_session(model: CounterModel) -> Session:
    return Session(model, model.kv.open_state())


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    whole = teacher_forced(open_session(CounterModel()), IDS, len(IDS))
    assert (teacher_forced(open_session(CounterModel()), IDS, chunk) == whole).all()


def test_a_pass_takes_a_whole_chunk() -> None:
    model = CounterModel()
    teacher_forced(open_session(model), IDS, 4)
    assert model.passes == [4, 4, 2]


def test_rewind_and_go_on_equals_a_fresh_session() -> None:
    session = open_session(CounterModel())
    teacher_forced(session, IDS, 4)
    session.rewind(3)
    again = teacher_forced(session, [11, 12], 4)
    fresh = teacher_forced(open_session(CounterModel()), [*IDS[:3], 11, 12], 100)
    assert (again == fresh[3:]).all()
    assert list(session.ids) == [*IDS[:3], 11, 12]


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (IDS, 9),  # the last token must be run to know what follows it
        ([*IDS, 1], 10),
        (IDS[:4], 3),
        ([7, 3, 8, 200], 2),
        ([8], 0),
    ],
)
def test_the_common_prefix_is_kept(ids: list[int], kept: int) -> None:
    session = open_session(CounterModel())
    teacher_forced(session, IDS, 100)
    assert session.rewind_to_prefix_of(ids) == session.position == kept


def test_a_failed_pass_leaves_the_session_as_it_was() -> None:
    model = CounterModel()
    session = open_session(model)
    teacher_forced(session, IDS, 100)

    def fail(_pass: int, _layer: int) -> None:
        raise OSError("disk")

    model.before_layer = fail
    with pytest.raises(OSError, match="disk"):
        teacher_forced(session, list(range(100)), 100)
    assert (list(session.ids), len(session.state.table)) == (IDS, 1)


def test_cancel_is_honoured_between_layers_and_keeps_whole_passes() -> None:
    model = CounterModel()
    session = open_session(model)
    reached: list[tuple[int, int]] = []
    model.before_layer = lambda number, layer: reached.append((number, layer))
    with pytest.raises(Cancelled):
        teacher_forced(session, IDS, 4, cancelled=lambda: reached[-1] == (2, 1))
    assert reached[-1] == (2, 1)
    assert list(session.ids) == IDS[:4]


def test_close_gives_the_blocks_back_once() -> None:
    model = CounterModel()
    free = sorted(model.free)
    with open_session(model) as session:
        teacher_forced(session, list(range(200)), 100)
        assert len(model.free) == len(free) - 4
        session.close()
    assert sorted(model.free) == free
    with pytest.raises(RequestError, match="closed"):
        session.extend(np.zeros(1, np.int32), np.zeros(1, np.int32))
