"""GGUF files, made by the official writer, compute what the same numbers as safetensors do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError
from colibri.kernels.library import unavailable_reason
from colibri.models import mixtral, olmoe, qwen3_moe
from colibri.models.gguf import adopted
from colibri.models.registry import get_family
from tests.conformance.cases import SHARED
from tests.gguf_files import CHANGES, Type, convert
from tests.tiny import write_tiny

IDS = np.random.RandomState(3).randint(3, 500, 40).astype(np.int32)
TOLERANCE = 2e-5  # of the largest logit, float32 everywhere
FAMILIES = sorted(CHANGES)
QWEN, MIXTRAL, OLMOE = (each.FAMILY.model_type for each in (qwen3_moe, mixtral, olmoe))
EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
needs_native = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)


def usual(name: str) -> str:
    """Types as `Q4_K_M` mixes them."""
    if "token_embd" in name or name.startswith("output") or "attn_v" in name:
        return "q6_k"
    return "q5_k" if "attn_q" in name else "q4_k"


def made(path: Path, family: str, kind: Type, **changes: Any) -> tuple[Path, Path]:
    """The tiny model of a family in 256 columns where blocks want them."""
    found = get_family(family)
    spelling = "per-expert" if found.spelling == "fused" else None
    values = {**CHANGES[family], **changes}
    source = write_tiny(path / "source", found, spelling=spelling, **values)
    return convert(source, path / "model.gguf", kind)


def wide(family: str) -> dict[str, int]:
    """Rows of 256 for every matrix that may be coded."""
    config = get_family(family).tiny_config(**CHANGES[family])
    keys = [key for key in config if key.endswith("intermediate_size")]
    heads = {} if {"kv_lora_rank", "rotary_dim"} & config.keys() else {"head_dim": 64}
    experts = {key: 6 for key in ("num_experts", "num_local_experts") if key in config}
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, **dict.fromkeys(keys, 256)}
    return {**heads, **experts, **sizes}


def compare(file: Path, original: Path, tolerance: float = TOLERANCE, **settings: Any) -> None:
    with LLM.open(original, activations="float32", kv="f32") as llm:
        wanted = llm.logits(IDS)
        ids = llm.generate(IDS, max_tokens=8, ignore_eos=True).token_ids
    with LLM.open(file, activations="float32", kv="f32", **settings) as llm:
        found = llm.logits(IDS)
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()
        assert llm.generate(IDS, max_tokens=8, ignore_eos=True).token_ids == ids


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["f32", "f16", "q4_0", "q8_0"])
def test_families_compute_the_same(family: str, kind: str, tmp_path: Path) -> None:
    file, original = made(tmp_path, family, lambda _: kind)
    compare(file, original)


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mix_of_types_computes_the_same(family: str, tmp_path: Path) -> None:
    file, original = made(tmp_path, family, usual, **wide(family))
    compare(file, original, 1e-4)  # random codes of q4_k have a mean, and so large sums


@needs_native
@pytest.mark.parametrize(
    "kind", ["bf16", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q5_k", "iq4_nl", "mxfp4"]
)
def test_every_type_computes_the_same(kind: str, tmp_path: Path) -> None:
    file, original = made(tmp_path, QWEN, lambda _: kind, **wide(QWEN))
    compare(file, original)


@needs_native
@pytest.mark.parametrize("kind", ["f16", "q4_k", "q5_0"])
def test_placement_changes_no_bit(kind: str, tmp_path: Path) -> None:
    """Few slots, chunks and threads; every expert is read from three places of the file."""
    file, _ = made(tmp_path, QWEN, lambda _: kind, **wide(QWEN))
    with LLM.open(file, expert_slots="100%") as llm:
        wanted = llm.logits(IDS)
        assert llm.plan().kv_format == "f16"
    with LLM.open(file, expert_slots=4, prefill_chunk=7, threads=2) as llm:
        assert np.array_equal(llm.logits(IDS), wanted)
        assert llm.metrics().peak_rss_bytes > 0


def test_the_reference_kernels_read_it_too(tmp_path: Path) -> None:
    file, original = made(tmp_path, MIXTRAL, lambda _: "q4_0")
    compare(file, original, kernels="reference")


@needs_native
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared fixtures are not beside the checkout")
@pytest.mark.parametrize("name", [QWEN, MIXTRAL, OLMOE])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_fixtures_compute_the_same(name: str, kind: str, tmp_path: Path) -> None:
    file, original = convert(SHARED / "core" / name, tmp_path / "model.gguf", lambda _: kind)
    compare(file, original)


@needs_native
def test_parts_are_one_model(tmp_path: Path) -> None:
    """Any part means all of them; so does their directory."""
    source = write_tiny(tmp_path / "source", get_family(QWEN), **CHANGES[QWEN])
    folder = tmp_path / "parts"
    folder.mkdir()
    convert(source, folder / "model.gguf", lambda _: "q8_0", split=10)
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) > 2
    original = folder / "model-original"
    for path in (parts[0], parts[-1], folder):
        compare(path, original)
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(IncompleteModelError, match=rf"missing are {parts[1].name}"):
        LLM.open(parts[0])


def test_two_models_in_a_directory_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models; .*: a\.gguf, b\.gguf"):
        LLM.open(tmp_path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    from colibri.checkpoint.index import Checkpoint
    from tests.gguf_files import write_file

    path = write_file(tmp_path / "m.gguf", "mamba", {}, {"a.weight": np.zeros((2, 32), np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba' are not read; read are"):
        adopted(Checkpoint.open(path))
