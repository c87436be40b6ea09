"""How requests become prompts and what replies to them are held to."""

from pathlib import Path
from typing import Any

import pytest

from colibri.server.prompts import Conversation, chat_prompt
from colibri.server.served_model import ServedModel
from colibri.text.constraint import Constraints
from tests.unit.server.scripted import EOS, TEMPLATE, VOCAB, write_model

SILENT = TEMPLATE.replace("<think>", "").replace("</think>", "").replace("enable_thinking", "x")
ANSWER: dict[str, Any] = {"json_object": True}


@pytest.mark.parametrize("spelled", [False, True], ids=["token", "letters"])
@pytest.mark.parametrize(
    ("template", "thinking", "may_reason"),
    [(TEMPLATE, None, True), (TEMPLATE, False, False), (SILENT, None, False)],
    ids=["reasons", "switched off", "no reasoning in the template"],
)
def test_an_enforced_answer_reasons_only_where_the_model_does(
    tmp_path: Path, template: str, thinking: bool | None, may_reason: bool, spelled: bool
) -> None:
    model = ServedModel.load(write_model(tmp_path / "m", template=template))
    assert model.tokenizer is not None
    said = Conversation(
        messages=[{"role": "user", "content": "q"}], thinking=thinking, answer=ANSWER
    )
    constraint = chat_prompt(model, said).constraint
    assert constraint is not None
    mask = Constraints(model.tokenizer, VOCAB, [EOS])(constraint).mask()
    first = model.tokenizer.encode("<think>", special=not spelled, at_start=False)[0]
    assert mask[ord("{")]
    assert mask[first] == (may_reason and not spelled)
