"""Names of repositories, and where the shared cache keeps them; nobody is asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from colibri.checkpoint.strict_json import shown
from colibri.errors import HubError

# Owner and name, as the hub allows them; a lone name could as well be a directory.
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


class RepoName(NamedTuple):
    """A repository and, where one is named, a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> RepoName | None:
        """`OWNER/NAME` or `OWNER/NAME@REVISION`; None where `text` is neither."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found[1]:
            return None
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_name(text: str) -> RepoName:
    """The repository that `text` names.

    Raises:
        HubError: it names none.
    """
    found = RepoName.parse(text)
    if found is None:
        raise HubError(
            f"{shown(text)} is no repository: write OWNER/NAME, or OWNER/NAME@REVISION for a "
            "branch, a tag or a commit"
        )
    return found


def repository_folder(repo: str) -> Path:
    """The folder of a model's repository in the shared cache."""
    from huggingface_hub import constants

    mark = constants.REPO_ID_SEPARATOR
    return Path(constants.HF_HUB_CACHE) / mark.join(("models", *repo.split("/")))


def snapshot_of(name: RepoName) -> Path | None:
    """The directory of a cached repository, None where it is not cached; nobody is asked."""
    folder, revision = repository_folder(name.repo), name.revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def cached_name(directory: Path) -> RepoName | None:
    """The repository and commit of a directory in the cache; None of any other."""
    directory = directory.absolute()
    mark, _, repo = directory.parent.parent.name.partition("--")
    if directory.parent.name != "snapshots" or mark != "models" or "--" not in repo:
        return None
    return RepoName(repo.replace("--", "/", 1), directory.name)


def title(directory: Path) -> str:
    """What a model is called: its repository where it lies in the cache, else its directory.

    Of a single file it is the file's name.
    """
    if directory.is_file():
        return directory.stem
    cached = cached_name(directory)
    return directory.resolve().name if cached is None else cached.repo
