"""Inverse frequencies of every kind against their formulae, dim by dim in float64."""

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.nn.rope import Rope, yarn_mscale

DIM, CONTEXT = 64, 512
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
thetas = st.sampled_from([500.0, 1e4, 150000.0, 1e6])


def rope(head_dim: int = DIM, context: int = CONTEXT, **parameters: Any) -> Rope:
    """Built from parameters, theta 10,000 unless given."""
    given = {"rope_theta": 1e4, **parameters}
    return Rope.from_parameters(given, head_dim=head_dim, max_position_embeddings=context)


def plain(theta: float, dims: int) -> list[float]:
    """`theta^(-2i/r)`."""
    return [math.exp(-2 * i / dims * math.log(theta)) for i in range(dims // 2)]


def turns_into_dim(turns: float, theta: float, dims: int, original: float) -> float:
    """The (real) dim that makes so many turns within the original context."""
    return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn(
    theta: float, dims: int, scale: float, original: float, fast: float, slow: float, whole: bool
) -> list[float]:
    """YaRN: kept above `low`, divided by the factor below `high`, linear between."""
    low, high = (turns_into_dim(turns, theta, dims, original) for turns in (fast, slow))
    if whole:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dims - 1.0)
    found = []
    for i, f in enumerate(plain(theta, dims)):
        ramp = min(max((i - low) / (high - low or 0.001), 0.0), 1.0)
        found.append(f / scale * ramp + f * (1 - ramp))
    return found


def llama3(
    theta: float, dims: int, factor: float, low: float, high: float, o: float
) -> list[float]:
    """By wavelength, as the models' own code has it."""
    found = []
    for f in plain(theta, dims):
        wavelength = 2 * math.pi / f
        if wavelength < o / high:
            found.append(f)
        elif wavelength > o / low:
            found.append(f / factor)
        else:
            smooth = (o / wavelength - low) / (high - low)
            found.append((1 - smooth) * f / factor + smooth * f)
    return found


@given(thetas, st.sampled_from([2, 8, 64, 128]))
def test_default(theta: float, dims: int) -> None:
    found = rope(dims, rope_theta=theta)
    assert found.rotary_dim == dims
    assert found.inverse_frequencies.dtype == np.float64
    assert found.attention_factor == 1
    assert np.allclose(found.inverse_frequencies, plain(theta, dims), rtol=1e-13)


@given(thetas, st.sampled_from([1.0, 2.5, 8.0]))
def test_linear_divides_positions(theta: float, factor: float) -> None:
    found = rope(rope_type="linear", factor=factor, rope_theta=theta)
    wanted = [f / factor for f in plain(theta, DIM)]
    assert np.allclose(found.inverse_frequencies, wanted, rtol=1e-13)
    assert found.attention_factor == 1


def test_dynamic_is_plain_within_the_context() -> None:
    found = rope(rope_type="dynamic", factor=4.0)
    assert np.allclose(found.inverse_frequencies, plain(1e4, DIM), rtol=1e-13)


@given(
    thetas,
    st.sampled_from([2.0, 4.0, 40.0]),
    st.sampled_from([64, 4096]),
    st.sampled_from([(32.0, 1.0), (8.0, 2.0)]),
    st.booleans(),
)
def test_yarn(
    theta: float, factor: float, original: int, betas: tuple[float, float], truncate: bool
) -> None:
    found = rope(
        **YARN | {"factor": factor},
        rope_theta=theta,
        original_max_position_embeddings=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        truncate=truncate,
    )
    wanted = yarn(theta, DIM, factor, original, *betas, truncate)
    assert np.allclose(found.inverse_frequencies, wanted, rtol=1e-12)
    assert found.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)


def test_yarn_defaults() -> None:
    """Fast 32, slow 1, whole dims, and the model's context where no original one is named."""
    wanted = yarn(1e4, DIM, 4.0, CONTEXT, 32.0, 1.0, True)
    assert np.allclose(rope(**YARN).inverse_frequencies, wanted, rtol=1e-13)
    nulls = {"beta_fast": None, "beta_slow": None, "original_max_position_embeddings": None}
    assert np.allclose(rope(**YARN, **nulls).inverse_frequencies, wanted, rtol=1e-13)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": None}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.7}, 1.5),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_factor(given: dict[str, Any], wanted: float) -> None:
    assert rope(**YARN, **given).attention_factor == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("scale", "mscale", "wanted"), [(0.5, 3.0, 1.0), (1.0, 3.0, 1.0), (math.e, 0.5, 1.05)]
)
def test_yarn_mscale(scale: float, mscale: float, wanted: float) -> None:
    assert yarn_mscale(scale, mscale) == pytest.approx(wanted)


@given(thetas, st.sampled_from([2.0, 32.0]), st.sampled_from([256, 8192]), st.floats(0.25, 2))
def test_llama3(theta: float, factor: float, original: int, low: float) -> None:
    found = rope(
        **LLAMA3 | {"factor": factor, "low_freq_factor": low},
        rope_theta=theta,
        original_max_position_embeddings=original,
    )
    wanted = llama3(theta, DIM, factor, low, 4.0, original)
    assert np.allclose(found.inverse_frequencies, wanted, rtol=1e-12)
    assert found.attention_factor == 1


@pytest.mark.parametrize(
    ("share", "rotary"), [(1, 64), (0.5, 32), (0.25, 16), (0.334, 21 - 21 % 2)]
)
def test_part_of_a_head(share: float, rotary: int) -> None:
    head_dim = 60 if share == 0.334 else DIM
    found = rope(head_dim, partial_rotary_factor=share)
    assert found.rotary_dim == rotary
    assert np.allclose(found.inverse_frequencies, plain(1e4, rotary), rtol=1e-13)


def test_table_is_float64_rounded_once() -> None:
    found = rope(**YARN)
    positions = np.array([511, 0, 1_000_000, 7], np.int32)
    table = found.table(positions)
    assert table.cos.shape == table.sin.shape == (4, 32)
    for row, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(found.inverse_frequencies.tolist()):
            angle = position * frequency
            assert table.cos[row, i] == np.float32(math.cos(angle) * found.attention_factor)
            assert table.sin[row, i] == np.float32(math.sin(angle) * found.attention_factor)
    assert table.cos.dtype == table.sin.dtype == np.float32


def test_equal_tables_share_a_key() -> None:
    assert rope(**YARN).key == rope(**YARN).key
    assert len({found.key for found in (rope(), rope(**YARN), rope(rope_theta=1e6))}) == 3
    assert rope(**YARN).key != rope(**YARN, attention_factor=2.0).key


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        ({**YARN, "truncate": "no"}, "truncate"),
        ({**YARN, "factor": math.inf}, "factor"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta"),
        ({**YARN, "beta_fast": "x"}, "beta_fast"),
        ({**YARN, "attention_factor": 0}, "attention_factor"),
        ({**YARN, "original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        *(({**LLAMA3, key: None}, key) for key in LLAMA3 if key != "rope_type"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 5 / 64}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1e300}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_refusals_name_the_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"rope_parameters.{key} ")):
        rope(**given)


def test_unknown_kind() -> None:
    with pytest.raises(UnsupportedModelError, match="'longrope' is not implemented") as refusal:
        rope(rope_type="longrope")
    known = ("default", "linear", "dynamic", "yarn", "llama3")
    assert all(kind in str(refusal.value) for kind in known)


def test_parameters_by_kind_of_layer_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_parameters\.full_attention"):
        rope(full_attention={"rope_type": "default"}, sliding_attention={"rope_type": "default"})


@pytest.mark.parametrize("key", ["alpha", "short_factor", "nonsense"])
def test_a_key_that_nothing_reads_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"rope_parameters\.{key} = 3"):
        rope(**{key: 3})
    assert rope(**{key: None}).rotary_dim == rope().rotary_dim


@pytest.mark.parametrize(
    "changes",
    [
        {"mscale_all_dim": 1e300, "mscale": 1.0},
        {"rope_theta": 1e-300, "rope_type": "linear", "factor": 1e-300},
    ],
)
def test_numbers_that_floats_cannot_follow_are_refused(changes: dict[str, Any]) -> None:
    given = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, **changes}
    with pytest.raises(ConfigError, match="finite frequencies"):
        Rope.from_parameters(given, head_dim=64, max_position_embeddings=64)
