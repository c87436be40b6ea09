import dataclasses
from pathlib import Path
from typing import Any

import pytest

from colibri.errors import SettingsError
from colibri.kernels.api import Activations
from colibri.settings import Settings, flag_of, variable_of

GIB = 2**30


def test_defaults() -> None:
    settings = Settings.resolve({})
    assert settings == Settings()
    assert (settings.prefill_chunk, settings.activations) == (512, None)


def test_explicit_beats_environment_beats_default() -> None:
    environ = {"COLIBRI_RAM": "2GiB", "COLIBRI_PREFILL_CHUNK": "64", "PATH": "/bin"}
    settings = Settings.resolve(environ, ram="1GiB", threads=2)
    assert (settings.ram, settings.prefill_chunk, settings.threads) == (GIB, 64, 2)


def test_none_counts_as_not_given() -> None:
    assert Settings.resolve({"COLIBRI_THREADS": "3"}, threads=None).threads == 3


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_KV", "f32")
    assert Settings.resolve().kv == "f32"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("model", Path("a/b"), "a/b"),
        ("ram", "12GiB", 12 * GIB),
        ("ram", 4096, 4096),
        ("expert_slots", "25%", 0.25),
        ("expert_slots", "12.5%", 0.125),
        ("expert_slots", 0.5, 0.5),
        ("expert_slots", "100%", 1.0),
        ("expert_slots", "7", 7),
        ("expert_slots", 7, 7),
        ("kv", "bf16", "bf16"),
        ("context_length", "4096", 4096),
        ("max_stall", "0.5", 0.5),
        ("max_stall", 3, 3.0),
        ("max_sessions", "4", 4),
        ("activations", "float32", Activations.FLOAT32),
        ("kernels", "reference", "reference"),
    ],
)
def test_values_are_read(name: str, value: Any, wanted: object) -> None:
    read = getattr(Settings.resolve({}, **{name: value}), name)
    assert read == wanted
    assert type(read) is type(wanted)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "", "text that is not empty"),
        ("ram", "lots", "a size such as"),
        ("ram", 1.5, "a size such as 12GiB"),
        ("ram", True, "a size such as 12GiB"),
        ("ram", "8", "did you mean 8GiB"),
        ("ram", 8, "did you mean 8GiB"),
        ("expert_slots", "0%", "a share of all of them"),
        ("expert_slots", "101%", "a share of all of them"),
        ("expert_slots", "x%", "a share of all of them"),
        ("expert_slots", "nan%", "a share of all of them"),
        ("expert_slots", 0, "of at least 1"),
        ("expert_slots", 1.5, "a share of all of them"),
        ("kv", "int3", "one of auto, f32, bf16, f16, int8"),
        ("context_length", 0, "a whole number of at least 1"),
        ("prefill_chunk", "-1", "a whole number of at least 1"),
        ("prefill_chunk", True, "a whole number of at least 1"),
        ("threads", 1.0, "a whole number of at least 1"),
        *[("max_stall", v, "a number of seconds") for v in (0, "-1", "inf", "nan", "x", True)],
        ("activations", "int4", "one of float32, int16, int8"),
        ("kernels", None.__class__, "one of auto, native, reference"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}.*{message}"):
        Settings.resolve({}, **{name: value})


def test_explicit_names_are_written_as_whoever_gives_them_wants() -> None:
    with pytest.raises(SettingsError, match=r"^--kv-ram is"):
        Settings.resolve({}, flag_of, kv_ram="much")


def test_a_bad_variable_is_refused_by_its_own_name() -> None:
    with pytest.raises(SettingsError, match=r"^COLIBRI_THREADS is 'two': it must be a whole"):
        Settings.resolve({"COLIBRI_THREADS": "two"})


def test_a_bad_variable_is_refused_even_where_a_flag_wins() -> None:
    with pytest.raises(SettingsError, match="COLIBRI_THREADS"):
        Settings.resolve({"COLIBRI_THREADS": "two"}, threads=2)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(SettingsError, match="setting expert_slot: did you mean expert_slots"):
        Settings.resolve({}, expert_slot=1)
    with pytest.raises(
        SettingsError, match="variable COLIBRI_TREADS: did you mean COLIBRI_THREADS"
    ):
        Settings.resolve({"COLIBRI_TREADS": "1"})


def test_every_field_is_a_documented_knob() -> None:
    table = Settings.describe()
    for field in dataclasses.fields(Settings):
        assert field.metadata.keys() == {"parse", "metavar", "help", "command"}
        assert (
            f"| `{field.name}` | `{flag_of(field.name)}` | `{variable_of(field.name)}` |" in table
        )
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_planner_gets_its_share() -> None:
    memory = Settings.resolve({}, ram=GIB, expert_slots="50%", kv="f16", kv_ram=5 << 20).memory
    assert (memory.ram, memory.expert_slots, memory.kv, memory.kv_ram) == (GIB, 0.5, "f16", 5 << 20)
    assert (memory.context_length, memory.prefill_chunk) == (None, 512)
