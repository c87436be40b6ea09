"""How the bench starts a server, and what it makes of replies."""

import pytest

from colibri.errors import EngineDiedError
from colibri.lab.served import Heard, Prompts, ServedProcess, flags_of
from colibri.settings import Settings


def test_settings_become_the_flags_that_mean_them() -> None:
    settings = Settings.resolve(
        model="m", expert_slots=0.25, ram="2G", max_stall=0.5, heat=False, mirror=["a", "b"]
    )
    flags = flags_of(settings)
    given = {flags[i]: flags[i + 1] for i in range(0, len(flags), 2)}
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    again = Settings.resolve({}, **{**names, "mirror": list(settings.mirror)})
    assert again == settings
    assert flags.count("--mirror") == 2
    assert flags_of(Settings()) == []


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineDiedError, match=r"the server of the bench ended.*nowhere"):
        ServedProcess(Settings.resolve(model="nowhere"))


def test_a_reply_knows_its_pauses() -> None:
    heard = Heard(10.0, [12.0, 12.5, 14.0], [1, 1, 3])
    assert (heard.ttft_s, heard.gaps) == (2.0, [0.5, 1.5])
    assert (Heard(10.0).ttft_s, Heard(10.0).gaps) == (None, [])


def test_prompts_are_all_different() -> None:
    prompts = Prompts(5, 9, 100, 1)
    first, second = next(prompts), next(prompts)
    assert len(first["prompt"]) == 5
    assert first["prompt"] != second["prompt"] != next(Prompts(5, 9, 100, 2))["prompt"]
    assert max(first["prompt"]) < 100
    assert first["max_tokens"] == 9
