"""From a training checkpoint to a model, and from a model to a Hugging Face checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tools.demo import corpus
from tools.demo.model import Config, Model, hugging_face_config, hugging_face_state, write_json
from tools.demo.optimizer import bind


def load(work: Path) -> tuple[Model, dict[str, Any]]:
    """The model of the last checkpoint, in evaluation mode, and what else the checkpoint holds."""
    state = torch.load(work / "checkpoint.pt", weights_only=True, mmap=True)
    model = Model(Config(**state["config"]))
    bind(model, state["weights"].clone(), None)
    facts = {name: state[name] for name in ("config", "recipe", "counters", "budget")}
    return model.requires_grad_(False).eval(), facts


def export(work: Path, out: Path, dtype: str) -> None:
    """Write config.json, model.safetensors, the tokenizer and generation_config.json."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    model, facts = load(work)
    end = int(Tokenizer.from_file(str(work / "tokenizer.json")).token_to_id(corpus.END) or 0)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(kind) for name, tensor in hugging_face_state(model).items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", hugging_face_config(model.c, end, dtype))
    generation = {"bos_token_id": end, "eos_token_id": end, "do_sample": True}
    write_json(out / "generation_config.json", {**generation, "temperature": 0.8, "top_p": 0.95})
    shutil.copyfile(work / "tokenizer.json", out / "tokenizer.json")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": corpus.END,
            "eos_token": corpus.END,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.c.max_position_embeddings,
        },
    )
    steps, seconds, tokens = facts["counters"]
    print(f"{out}: {dtype}, step {steps:.0f}, {tokens / 1e6:.1f} M tokens, {seconds / 60:.0f} min")
