"""What the shared cache holds, and taking it away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibri.checkpoint.hub.names import RepoName
from colibri.errors import HubError

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One commit of a repository in the cache.

    Attributes:
        repo: its name.
        commit: 40 hexadecimal digits.
        revisions: branches and tags that were this commit when they were pulled.
        directory: where its files are.
        nbytes: of its files; commits may share some.
        num_files: of them.
        num_unfinished: beginnings of files of the repository, which a pull goes on with.
        used_s: when a file of it was last read, in seconds since 1970.
        has_weights: whether there is anything that a model could be read from.
    """

    repo: str
    commit: str
    revisions: tuple[str, ...]
    directory: Path
    nbytes: int
    num_files: int
    num_unfinished: int
    used_s: float
    has_weights: bool

    @property
    def name(self) -> RepoName:
        """By which commands find it."""
        if "main" in self.revisions:
            return RepoName(self.repo)
        return RepoName(self.repo, self.revisions[0] if self.revisions else self.commit)


def cached_models() -> list[CachedModel]:
    """The models in the cache, by name."""
    from huggingface_hub import CacheNotFound

    try:
        scanned = _scan().repos
    except CacheNotFound:
        return []
    found = [
        CachedModel(
            repo=repo.repo_id,
            commit=revision.commit_hash,
            revisions=tuple(sorted(revision.refs)),
            directory=revision.snapshot_path,
            nbytes=revision.size_on_disk,
            num_files=revision.nb_files,
            num_unfinished=len(list(repo.repo_path.glob("blobs/*.incomplete"))),
            used_s=max((file.blob_last_accessed for file in revision.files), default=0.0),
            has_weights=any(file.file_name.endswith(_WEIGHTS) for file in revision.files),
        )
        for repo in scanned
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(found, key=lambda model: (model.repo, model.commit))


def matching(name: RepoName) -> list[CachedModel]:
    """What the cache has under a name: every commit of the repository, or the one that is named.

    Raises:
        HubError: it has nothing.
    """
    found = [model for model in cached_models() if model.repo == name.repo]
    if name.revision is not None:
        wanted = name.revision
        found = [m for m in found if wanted in m.revisions or m.commit.startswith(wanted)]
    if not found:
        raise HubError(f"{name} is not in the cache; what is there, `coli list` shows")
    return found


def remove(models: Sequence[CachedModel]) -> int:
    """Take models out of the cache; files that others share stay. Returns the bytes that are free.

    Of a repository that has no other commit there, beginnings of files go too.
    """
    begun = {model.repo: _begun_bytes(model) for model in models}
    strategy = _scan().delete_revisions(*(model.commit for model in models))
    strategy.execute()
    kept = {model.repo for model in cached_models()}
    gone = sum(nbytes for repo, nbytes in begun.items() if repo not in kept)
    return strategy.expected_freed_size + gone


def _scan() -> HFCacheInfo:
    from huggingface_hub import constants, scan_cache_dir

    return scan_cache_dir(constants.HF_HUB_CACHE)


def _begun_bytes(model: CachedModel) -> int:
    blobs = model.directory.parent.parent / "blobs"
    return sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
