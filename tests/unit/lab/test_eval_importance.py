"""What experts meet is what the router sends them, and the file says whose it is."""

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.byte_tokenizer import write_byte_tokenizer
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.importance import LayerImportance, read_importance, write_importance
from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.kernels.api import Routing
from colibri.kernels.reference import swiglu
from colibri.lab.eval_importance import eval_importance
from colibri.lab.eval_text import Cut
from colibri.lab.routed import sparse_layers
from colibri.models import llama
from colibri.models.description import Description
from colibri.models.family import Family
from colibri.settings import Settings
from tests.tiny import PLAIN, each_sparse, write_tiny

TEXT = "Hummingbirds hover, and they fly backwards too. "


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


def collect(model: Path, folder: Path, cut: Cut = Cut()) -> Path:  # noqa: B008  (frozen)
    (folder / "text").write_text(TEXT * 2)
    settings = Settings.resolve({}, model=str(model), prefill_chunk=16)
    eval_importance([folder / "text"], folder / "importance", cut, settings, silent)
    return folder / "importance"


@each_sparse
def test_sums_are_those_of_what_was_routed(family: Family, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", family)
    write_byte_tokenizer(model)
    index = Description.of(Checkpoint.open(model)).experts
    found = read_importance(collect(model, tmp_path), index)
    seen: dict[int, list[Routing]] = {}
    with LLM.open(model) as llm:
        assert llm.prepared.tokenizer is not None
        ids = llm.prepared.tokenizer.encode_prompt(TEXT * 2)
        llm.logits(ids, routes=lambda layer, routing: seen.setdefault(layer, []).append(routing))
        acts = {moe.layer: moe.experts.swiglu for moe in sparse_layers(llm._model)}  # type: ignore[arg-type]
    for layout in index.layers:
        layer, (routing,) = found[layout.layer], seen[layout.layer]
        assert layer.rows.sum() == routing.ids.size
        for expert in range(0, layout.num_experts, 3):
            hidden = routing.hidden[(routing.ids == expert).any(axis=1)]
            data = read_expert(index, layout, expert)
            gate, up = (
                hidden @ part.format.decode(bytes_, (part.rows, part.columns)).T
                for part, bytes_ in zip(layout.parts[:2], data, strict=False)
            )
            if layout.biases is not None:
                gate, up = (
                    x + b.view(np.float32) for x, b in zip((gate, up), data[3:], strict=False)
                )
            mixed = swiglu(gate, up, acts[layout.layer])
            assert layer.rows[expert] == len(hidden)
            assert np.allclose(layer.input[expert], np.square(hidden).sum(axis=0), rtol=1e-4)
            assert np.allclose(layer.hidden[expert], np.square(mixed).sum(axis=0), rtol=1e-3)


def test_windows_do_not_tell_tokens_twice(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", PLAIN)
    write_byte_tokenizer(model)
    index = Description.of(Checkpoint.open(model)).experts
    active = PLAIN.tiny_config()["num_experts_per_tok"]
    for window in (17, 256):
        found = read_importance(collect(model, tmp_path, Cut(context=window, apart=True)), index)
        told = next(iter(found.values())).rows.sum() / active
        assert len(TEXT) * 2 <= told <= len(TEXT) * 2 + len(TEXT) * 2 // 16


def test_an_expert_that_was_never_met() -> None:
    layer = LayerImportance.empty(3, 4, 2)
    layer.rows[1], layer.input[1], layer.hidden[1] = 2, 8.0, 6.0
    gate, up, down = layer.of(1)
    assert gate is not None
    assert down is not None
    assert gate.tolist() == [4.0] * 4
    assert up is gate
    assert down.tolist() == [3.0] * 2
    assert layer.of(0) == (None, None, None)
    layer.hidden[1] = 0
    assert layer.of(1)[2] is None


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", PLAIN)
    index = Description.of(Checkpoint.open(model)).experts
    first = index.layers[0].layer
    sizes = (index.layers[0].num_experts, index.layers[0].parts[0].columns)
    good = {
        layout.layer: LayerImportance.empty(*sizes, layout.parts[2].columns)
        for layout in index.layers
    }
    path = tmp_path / "file"
    write_importance(path, good)
    assert read_importance(path, index).keys() == good.keys()
    write_importance(path, {n: layer for n, layer in good.items() if n != first})
    with pytest.raises(CheckpointError, match=rf"importance.{first}.rows: wanted I64 .*nothing"):
        read_importance(path, index)
    write_importance(path, good | {first: LayerImportance.empty(sizes[0], 3, 5)})
    with pytest.raises(CheckpointError, match=rf"importance.{first}.input: wanted F32 .*, 3\]"):
        read_importance(path, index)
    good[first].input[0, 0] = np.nan
    write_importance(path, good)
    with pytest.raises(CheckpointError, match="negative or not finite"):
        read_importance(path, index)


def test_models_without_experts_have_none(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", llama.FAMILY)
    write_byte_tokenizer(model)
    with pytest.raises(UnsupportedModelError, match="no routed experts"):
        collect(model, tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        write_importance(tmp_path / "nowhere" / "file", {0: LayerImportance.empty(1, 1, 1)})
