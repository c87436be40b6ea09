"""Files that are not what the manifest says, and manifests that say what cannot be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colibri.checkpoint.container import open_container
from colibri.checkpoint.container_manifest import MANIFEST
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def test_missing_files_are_counted(container_dir: Path) -> None:
    (container_dir / "experts-00001.safetensors").unlink()
    with pytest.raises(IncompleteModelError, match=r"found 3 of the 4 files.*experts-00001"):
        open_container(container_dir)


def test_a_cut_file_is_named(container_dir: Path) -> None:
    path = container_dir / "experts-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IncompleteModelError, match="experts-00004"):
        open_container(container_dir)


def test_a_foreign_file_is_named(container_dir: Path) -> None:
    source = container_dir / "experts-00001.safetensors"
    (container_dir / "experts-00002.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match="experts-00002"):
        open_container(container_dir)


def test_a_cut_manifest_is_refused(container_dir: Path) -> None:
    path = container_dir / MANIFEST
    text = path.read_bytes()
    for sixteenth in range(16):
        path.write_bytes(text[: len(text) * sixteenth // 16])
        with pytest.raises(CheckpointError, match=r"colibri\.json"):
            open_container(container_dir)


MUTATIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no family": lambda m: m.pop("family"),
    "no parts": lambda m: m.pop("parts"),
    "parts of one layer": lambda m: m["parts"].pop("1"),
    "parts are a list": lambda m: m.update(parts=[]),
    "a part is gone": lambda m: m["parts"]["1"].pop(),
    "parts in another order": lambda m: m["parts"]["1"].reverse(),
    "negative shape": lambda m: m["parts"]["1"][0].update(shape=[-40, 72]),
    "another shape": lambda m: m["parts"]["1"][0].update(shape=[4000, 7200]),
    "shape of three": lambda m: m["parts"]["1"][0].update(shape=[1, 40, 72]),
    "one expert more": lambda m: m["num_experts"].update({"1": 4}),
    "very many experts": lambda m: m["num_experts"].update({"1": 1 << 60}),
    "no experts": lambda m: m["num_experts"].update({"1": 0}),
    "layer spelled oddly": lambda m: m["num_experts"].update({"01": 3}),
    "a layer more": lambda m: (
        m["parts"].update({"9": m["parts"]["1"]}),
        m["num_experts"].update({"9": 3}),
    ),
    "another dense format": lambda m: m["dense"]["lm_head.weight"].update(format="int8-g64"),
    "a coded vector": lambda m: m["dense"]["model.norm.weight"].update(format="int4-g64"),
    "dense tensor too many": lambda m: m["dense"].update(x={"format": "f32", "shape": [1]}),
    "dense tensor too few": lambda m: m["dense"].pop("model.norm.weight"),
    "group sizes": lambda m: m["group_sizes"].update({"int4-g64": 32}),
    "a file outside": lambda m: m["files"].update(
        {"../dense-00000.safetensors": {"bytes": 1, "sha256": ""}}
    ),
    "size as text": lambda m: m["files"]["dense-00000.safetensors"].update(bytes="1"),
    "no file of a layer": lambda m: m["files"].pop("experts-00001.safetensors"),
    "source is text": lambda m: m.update(source="here"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_manifest_is_refused(name: str, container_dir: Path) -> None:
    change(container_dir, MUTATIONS[name])
    with pytest.raises(CheckpointError, match=r"colibri\.json|safetensors"):
        open_container(container_dir)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(version=2),
        lambda m: m.update(layout="panels-16"),
        lambda m: m["parts"]["1"][0].update(format="int3-g64"),
    ],
    ids=["version", "layout", "format"],
)
def test_what_a_later_release_wrote_is_refused(
    edit: Callable[[dict[str, Any]], object], container_dir: Path
) -> None:
    change(container_dir, edit)
    with pytest.raises(UnsupportedModelError, match=r"colibri\.json"):
        open_container(container_dir)
