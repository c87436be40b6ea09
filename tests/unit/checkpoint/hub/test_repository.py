"""What a hub says of a repository is believed only where it can be."""

from typing import Any

import pytest

from colibri.checkpoint.hub.digest import Digest
from colibri.checkpoint.hub.names import RepoName, parse_name
from colibri.checkpoint.hub.repository import HubFile, Listing, list_files
from colibri.errors import HubError
from tests.hub import COMMIT, Hub, git_sha1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("owner/name", RepoName("owner/name")),
        ("owner/name@main", RepoName("owner/name", "main")),
        ("Qwen/Qwen3-30B-A3B@refs/pr/1", RepoName("Qwen/Qwen3-30B-A3B", "refs/pr/1")),
        ("name", None),
        ("/owner/name", None),
        ("a/b/c", None),
        ("../name", None),
        ("./name", None),
        ("owner/name@", None),
        ("owner/na--me", None),
    ],
)
def test_names(text: str, found: RepoName | None) -> None:
    assert RepoName.parse(text) == found
    if found is None:
        with pytest.raises(HubError, match="is no repository: write OWNER/NAME"):
            parse_name(text)
    else:
        assert str(parse_name(text)) == text


def listing(*names: str) -> Listing:
    digest = Digest("git-sha1", "0" * 40)
    return Listing(
        RepoName("a/b"), COMMIT, tuple(HubFile(name, 1, digest) for name in sorted(names))
    )


def chosen(found: Listing, *include: str) -> list[str]:
    return [file.name for file in found.chosen(include)]


def test_a_model_is_read_from_safetensors_where_there_are_any() -> None:
    found = listing("config.json", "model.safetensors", "model.gguf", "pytorch_model.bin", "a.png")
    assert chosen(found) == ["config.json", "model.safetensors"]
    assert chosen(found, "*.gguf", "c*") == ["config.json", "model.gguf"]


def test_one_of_several_gguf_models_has_to_be_chosen() -> None:
    split = listing("README.md", "q4-00001-of-00002.gguf", "q4-00002-of-00002.gguf")
    assert len(chosen(split)) == 3
    with pytest.raises(HubError, match=r"holds 2 models in GGUF: choose one by --include"):
        listing("q4.gguf", "q8.gguf").chosen(())


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(HubError, match=r"no file matches '\*\.gguf'; there are config.json"):
        listing("config.json").chosen(["*.gguf"])
    with pytest.raises(HubError, match="holds no safetensors and no GGUF"):
        listing("config.json", "pytorch_model.bin").chosen(())


def test_sizes_and_digests_come_with_the_names(hub: Hub) -> None:
    hub.repos["owner/model"] = {"config.json": b"{}", "model.safetensors": bytes(300)}
    found = list_files(RepoName("owner/model"))
    config, model = found.files
    assert config == HubFile("config.json", 2, Digest("git-sha1", git_sha1(b"{}")))
    assert (model.nbytes, model.digest.kind, found.commit) == (300, "sha256", COMMIT)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sha": "main"}, "names no commit"),
        ({"siblings": [{"rfilename": "../a", "size": 1, "blobId": "0" * 40}]}, "no path inside"),
        ({"siblings": [{"rfilename": "/a", "size": 1, "blobId": "0" * 40}]}, "no path inside"),
        ({"siblings": [{"rfilename": "a", "size": -1, "blobId": "0" * 40}]}, "the size -1"),
        ({"siblings": [{"rfilename": "a", "size": 1, "blobId": "../x"}]}, "the digest '../x'"),
        ({"siblings": [{"rfilename": "a", "size": 1}]}, "the digest None"),
        ({"siblings": 2 * [{"rfilename": "a", "size": 1, "blobId": "0" * 40}]}, "lists a file tw"),
    ],
)
def test_a_hub_that_lies_is_not_believed(hub: Hub, change: dict[str, Any], says: str) -> None:
    hub.repos["owner/model"] = {}
    hub.listing = hub.about("owner/model") | change
    with pytest.raises(HubError, match=says):
        list_files(RepoName("owner/model"))


def test_what_is_missing_is_said(hub: Hub) -> None:
    hub.repos["owner/model"] = {}
    with pytest.raises(HubError, match="there is no repository owner/other, or no leave"):
        list_files(RepoName("owner/other"))
    with pytest.raises(HubError, match="owner/model has no revision v9"):
        list_files(RepoName("owner/model", "v9"))


def test_offline_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        list_files(RepoName("owner/model"))
