"""Write docs/FAMILIES.md from the families' own files, or check that it is what they say.

Usage: `python tools/make_families.py [--check]`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from colibri.models.blueprint import Blueprint  # noqa: E402
from colibri.models.family import Family  # noqa: E402
from colibri.models.published import published_model, published_models  # noqa: E402
from colibri.models.registry import all_families  # noqa: E402

PATH = ROOT / "docs" / "FAMILIES.md"
GOLDENS = ROOT / "tests" / "goldens"
_LONG = 1 << 20  # positions
HEAD = """# Families

Made by `tools/make_families.py` from the families' files; a test keeps it true.

A family is found by config.json's `model_type`, at the top or under `text_config`. Every family
streams its routed experts, reads any spelling of them, and is computed by the same kernels. Each
is checked against Hugging Face's transformers: goldens in `tests/goldens`, made from a seeded tiny
checkpoint, hold its logits, greedy ids and choices of experts, those behind a prompt of 1,500
tokens, and those of its drafting heads where the table says so; ours stay within 2e-4 of them.
Every family is run in float32 and bfloat16, in containers, and rounded at load; the table adds in
which storage published checkpoints of it are run as they are. No family was run on published
weights here: those are too large for these tests. Config keys that would change the computation
and are not implemented are refused by name. Where heads that draft further tokens are known,
`--mtp true` loads them; elsewhere, and without it, they are left aside.

| model_type | what is peculiar | a token keeps | golden | as published | drafting heads | ignored |
|---|---|---|---|---|---|---|
"""
# Published storage that fixtures have, beside that of the models that `make_checkpoint` knows.
FIXTURES = {
    "deepseek_v3": ("fp8-e4m3-b128", "int4-g32-bf16"),
    "deepseek_v4": ("mxfp4",),
    "gpt_oss": ("mxfp4",),
    "qwen3_moe": ("fp8-e4m3 in blocks of 32 x 16",),
}


def peculiar(family: Family) -> str:
    """The first line of the family's file, without its name."""
    module = importlib.import_module(f"colibri.models.{family.model_type}")
    summary = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    return summary.rstrip(".")


def kept(family: Family) -> str:
    """Numbers that a position of the tiny model adds to its state, and fixed state, by kind."""
    states = Blueprint.of(family.tiny_config()).states(_LONG)
    kinds = []
    own = [[plane for plane in shape.planes if plane.stride == 1] for shape in states]
    pairs = [planes[0] for planes in own if len(planes) == 2 and planes[0] == planes[1]]
    if any(not plane.num_kept for plane in pairs):
        kinds.append("keys and values")
    if any(plane.num_kept for plane in pairs):
        kinds.append("keys and values of a window")
    if any(len({plane.width for plane in planes}) > 1 for planes in own):
        kinds.append("a latent")
    if any(shape.windows for shape in states):
        kinds.append("keys of a window")
    if any(plane.stride > 1 for shape in states for plane in shape.planes):
        kinds.append("entries of several positions")
    if any(shape.cell_nbytes for shape in states):
        kinds.append("a recurrent state")
    return ", ".join(kinds) or "nothing"


def goldens(family: Family) -> str:
    """What the goldens of the family hold."""
    parts = {"": "logits", ".long": "1,500 tokens", ".mtp": "drafting heads"}
    stem = GOLDENS / family.model_type
    return ", ".join(part for tail, part in parts.items() if Path(f"{stem}{tail}.npz").is_file())


def storage(family: Family) -> str:
    """Formats of published checkpoints that tests run as they are."""
    found = set(FIXTURES.get(family.model_type, ()))
    for name in published_models():
        published = published_model(name)
        if published.config["model_type"] in (family.model_type, *family.aliases):
            found |= {published.experts, published.dense}
    return ", ".join(sorted(found)) or "floats"


def row(family: Family) -> str:
    """One line of the table."""
    names = ", ".join(f"`{name}`" for name in (family.model_type, *family.aliases))
    ignored = ", ".join(f"`{pattern}`" for pattern in family.ignore) or "none"
    heads = "known" if family.mtp else "left aside"
    own = (peculiar(family), kept(family), goldens(family), storage(family), heads, ignored)
    return f"| {names} | {' | '.join(own)} |\n"


def text() -> str:
    """The whole file."""
    names = [family.model_type for family in all_families()]
    without = [name for name in names if not (GOLDENS / f"{name}.npz").is_file()]
    if without:
        raise SystemExit(f"no golden in tests/goldens: {', '.join(without)}")
    return HEAD + "".join(row(family).replace("\\|", "\\\\|") for family in all_families())


def main() -> None:
    """Write, or compare and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PATH.write_text(text(), encoding="utf-8")
    elif PATH.read_text(encoding="utf-8") != text():
        raise SystemExit("docs/FAMILIES.md is out of date: run python tools/make_families.py")


if __name__ == "__main__":
    main()
