import pytest

from colibri.lab.figure import Figure, device_bytes, why_no_measurement


def figure(**values: object) -> Figure:
    return Figure(figure="f", regime="r", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ({"value": 0.83, "at_least": 0.85, "interval": (0.80, 0.86)}, True),
        ({"value": 0.83, "at_least": 0.85, "interval": (0.80, 0.84)}, False),
        ({"value": 0.82, "at_least": 0.85, "interval": (0.80, 0.86)}, False),
        ({"value": 1.02, "at_most": 1.0, "interval": (0.99, 1.1)}, True),
        ({"value": 1.02, "at_most": 1.0, "interval": (1.01, 1.1)}, False),
        ({"value": 0.9, "at_most": 1.0}, True),
        ({"value": None, "at_least": 0.9}, None),
        ({"value": 1.0}, None),
    ],
)
def test_when_a_bar_is_reached(values: dict[str, object], holds: bool | None) -> None:
    assert figure(**values).holds is holds


def test_bytes_of_engine_and_device() -> None:
    assert figure(value=1.0, device_bytes=100, engine_bytes=101).bytes_agree
    assert figure(value=1.0, device_bytes=100, engine_bytes=102).bytes_agree is False
    assert figure(value=1.0, device_bytes=None, engine_bytes=102).bytes_agree is None
    assert (device_bytes() or 0) >= 0


def test_why_rows_are_no_measurement() -> None:
    good = Figure.of("f", "r", [1.0, 2.0, 3.0], device_bytes=0, engine_bytes=0)
    assert why_no_measurement([good], 3_000_000_000, 3) == []
    bad = figure(value=1.0, device_bytes=0, engine_bytes=102)
    few, rounds, bytes_ = why_no_measurement([good, bad], 2_999_999_999, 2)
    assert "2,999,999,999 bytes" in few
    assert "2 rounds" in rounds
    assert "(f)" in bytes_
