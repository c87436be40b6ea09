"""Tensors that hold several of ours: parts have the right bytes, whatever is nested."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from colibri.checkpoint.divide import Division, divide
from colibri.checkpoint.safetensors import read_header, read_tensor
from colibri.errors import CheckpointError

PAIR = Division("w13.weight", ("gate.weight", "up.weight"))
STACK = Division("experts.gate", ("experts.{}.gate.weight",))
STACKED_PAIR = Division("experts.w13", ("experts.gate", "experts.up"))


def read(
    directory: Path, tensors: dict[str, np.ndarray], *rules: Division
) -> dict[str, np.ndarray]:
    """What the rules make of the tensors, as arrays."""
    save_file(tensors, directory / "model.safetensors")
    found = divide(read_header(directory / "model.safetensors"), rules)
    return {
        name: read_tensor(spec).view(np.float32).reshape(spec.shape) for name, spec in found.items()
    }


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_rows_that_take_turns(tmp_path: Path) -> None:
    whole = numbers(6, 5)
    found = read(tmp_path, {"a.w13.weight": whole, "b.weight": numbers(2, 2)}, PAIR)
    np.testing.assert_array_equal(found.pop("a.gate.weight"), whole[::2])
    np.testing.assert_array_equal(found.pop("a.up.weight"), whole[1::2])
    assert list(found) == ["b.weight"]


def test_a_stack_of_rows_that_take_turns(tmp_path: Path) -> None:
    whole = numbers(3, 4, 5)
    found = read(tmp_path, {"experts.w13": whole}, STACKED_PAIR, STACK)
    for i in range(3):
        np.testing.assert_array_equal(found[f"experts.{i}.gate.weight"], whole[i, ::2])
    np.testing.assert_array_equal(found["experts.up"], whole[:, 1::2])


def test_the_last_row_may_end_the_file(tmp_path: Path) -> None:
    found = read(tmp_path, {"w13.weight": numbers(2, 3)}, PAIR)
    np.testing.assert_array_equal(found["up.weight"], [[3, 4, 5]])


@pytest.mark.parametrize(("shape", "rule"), [((5, 4), PAIR), ((4,), PAIR), ((4,), STACK)])
def test_what_does_not_divide_is_named(
    shape: tuple[int, ...], rule: Division, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"'{rule.theirs}': wanted a .*found"):
        read(tmp_path, {rule.theirs: numbers(*shape)}, rule)


def test_a_part_that_is_there_already_is_named(tmp_path: Path) -> None:
    tensors = {"w13.weight": numbers(2, 3), "up.weight": numbers(1, 3)}
    with pytest.raises(CheckpointError, match=r"both hold 'up\.weight'"):
        read(tmp_path, tensors, PAIR)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w13.weight": numbers(4, 3)}, path)
    spec = divide(read_header(path), [PAIR])["up.weight"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"wanted bytes up to {spec.end}"):
        read_tensor(spec)
