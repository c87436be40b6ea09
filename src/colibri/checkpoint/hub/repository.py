"""What a repository of the hub holds at one commit: names, sizes and digests of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from colibri.checkpoint.hub.digest import Digest
from colibri.checkpoint.hub.names import RepoName
from colibri.checkpoint.strict_json import clipped, shown
from colibri.errors import HubError

_LARGEST = 1 << 62
_UNREAD = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot"),
    *("*.tflite", "*.mlmodel", "*.pickle", "*.pkl", "*.npz", "*/*.safetensors", "*/*.gguf"),
    *("consolidated*", ".gitattributes", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg"),
    *("*.mp4", "*.pdf"),
)


class HubFile(NamedTuple):
    """A file of a repository: its path there, its size and the digest of its contents."""

    name: str
    nbytes: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit.

    Attributes:
        name: what was asked for.
        commit: 40 hexadecimal digits.
        files: by ascending name.
    """

    name: RepoName
    commit: str
    files: tuple[HubFile, ...]

    def chosen(self, include: Sequence[str]) -> tuple[HubFile, ...]:
        """The files whose names match a pattern; without any, those that a model is read from.

        Raises:
            HubError: no file matches, or there is nothing that a model could be read from.
        """
        if include:
            return self._matching(include)
        found = tuple(f for f in self.files if not _matches(f.name, _UNREAD))
        if any(file.name.endswith(".safetensors") for file in found):
            return tuple(file for file in found if not file.name.endswith(".gguf"))
        quantised = [file for file in found if file.name.endswith(".gguf")]
        sets = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", file.name) for file in quantised}
        if len(sets) > 1:
            raise HubError(
                f"{self.name} holds {len(sets)} models in GGUF: choose one by --include, as in "
                f"--include '{min(sets).removesuffix('.gguf')}*'; there are {_listed(sets)}"
            )
        if not sets:
            raise HubError(
                f"{self.name} holds no safetensors and no GGUF files, from which a model could be "
                f"read; it has {_listed(file.name for file in self.files)}"
            )
        return found

    def _matching(self, include: Sequence[str]) -> tuple[HubFile, ...]:
        for pattern in include:
            if not any(fnmatchcase(file.name, pattern) for file in self.files):
                raise HubError(
                    f"{self.name}: no file matches {shown(pattern)}; there are "
                    f"{_listed(file.name for file in self.files)}"
                )
        return tuple(file for file in self.files if _matches(file.name, include))


def list_files(name: RepoName) -> Listing:
    """Ask the hub what a repository holds.

    Raises:
        HubError: there is no such repository or revision, no leave to read it, or no answer.
    """
    from huggingface_hub import HfApi

    with hub_errors(name):
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    commit = info.sha
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise HubError(f"{name}: the hub names no commit, but {shown(commit)}: try again later")
    files = [_file(name, sibling) for sibling in info.siblings or ()]
    if len({file.name for file in files}) != len(files):
        raise HubError(f"{name}: the hub lists a file twice: try again later")
    return Listing(name, commit, tuple(sorted(files)))


def _file(name: RepoName, sibling: Any) -> HubFile:
    """One entry of the answer, held to what is done with it: paths that stay below a directory."""
    path, size, lfs = sibling.rfilename, sibling.size, sibling.lfs
    if not is_inside(path):
        raise HubError(f"{name}: the hub lists {shown(path)}, which is no path inside a directory")
    value = sibling.blob_id if lfs is None else lfs.sha256
    nbytes = size if lfs is None else lfs.size
    digest = Digest.of_name(value) if isinstance(value, str) else None
    if digest is None or type(nbytes) is not int or not 0 <= nbytes < _LARGEST:
        raise HubError(
            f"{name}: the hub gives {shown(path)} the size {shown(nbytes)} and the digest "
            f"{shown(value)}: nothing could be checked by that; try again later"
        )
    return HubFile(path, nbytes, digest)


@contextmanager
def hub_errors(name: RepoName) -> Iterator[None]:
    """Turn what huggingface_hub raises into HubError, in the words of the command."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its terms on its page, then log in with `hf auth login` or "
            "set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"there is no repository {name.repo}, or no leave to see it: check the name, and if it "
            "is private, log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{name.repo} has no revision {name.revision}: name a branch, a tag or a commit of it"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise HubError(
            f"{name} cannot be asked for: HF_HUB_OFFLINE is set; unset it, or use what is there "
            "(coli list)"
        ) from None
    except _failures() as error:
        raise HubError(f"{name}: the hub cannot be asked: {reason(error)}; try again") from None


def transport_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library raises that huggingface_hub uses, whichever that is."""
    from huggingface_hub.errors import HfHubHTTPError

    bases = (base for base in HfHubHTTPError.__bases__ if base is not OSError)
    return (HfHubHTTPError, *(base for base in bases if issubclass(base, Exception)))


def _failures() -> tuple[type[Exception], ...]:
    """What asking raises where nothing better is known; ValueError is a name it does not take."""
    return (ValueError, *transport_errors())


def reason(error: Exception) -> str:
    """Why a request failed, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return clipped(lines[0].rstrip(".")) if lines else type(error).__name__


def is_inside(path: object) -> bool:
    """Whether a name that others gave is that of a file below a directory."""
    if not isinstance(path, str) or re.search(r"[\\\0-\x1f]", path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Any, most: int = 12) -> str:
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "no files") + more
