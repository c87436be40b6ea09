"""Text of the demo model: eight domains taken out of public packages, and the tokenizer.

Every domain becomes a list of *blocks* (contiguous stretches of a document, about 8,000
characters, cut at a line end).  Each tenth of the text is held out, block by block, and is never
seen by the tokenizer or by the training.  The command writes, under the work folder::

    corpus/<domain>.train.txt, corpus/<domain>.heldout.txt   readable text, blocks separated
    tokens/<domain>.train.npy, tokens/<domain>.heldout.npy   uint16 [n]
    tokenizer.json, corpus.json                              byte-level BPE, sizes and sources
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.demo.domains import READERS
from tools.demo.sources import SOURCES, fetch

SEED = 20240
VOCAB = 4096
END = "<|endoftext|>"
BLOCK_CHARS = 8000
HELD_OUT_EVERY = 10
DOMAINS: tuple[str, ...] = tuple(source.domain for source in SOURCES)


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
    end = int(tokenizer.token_to_id(END) or 0)
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


def load(work: Path, part: str) -> dict[str, NDArray[np.uint16]]:
    """Tokens of every domain, `part` being `train` or `heldout`: name -> uint16 [n]."""
    return {d: np.load(work / f"tokens/{d}.{part}.npy") for d in DOMAINS}
