"""The trained model as a container in the package, with what was measured of it.

Everything is measured by Colibri itself on held-out text: the loss of the float32 export and of the
container, and the divergence between them, with the settings that users get. Written into the
folder: the container, `experts.json` (tools/atlas.py), `card.json` (all figures) and MODEL_CARD.md.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.verify import verify_container
from colibri.cli.facts import facts_of_model
from colibri.models.convert import convert_model
from colibri.models.description import Description
from tools import atlas
from tools.demo import card, corpus, held_out
from tools.demo.ngram import Ngram

BUNDLED = Path(__file__).resolve().parents[2] / "src" / "colibri" / "bundled"
DENSE = "int8-g64"
# Formats of gate and up, and of down; the first that keeps to both limits is taken.
EXPERTS = (("int4-g64", "int4-g64"), ("int4-g64", "int8-g64"), ("int4-g32", "int8-g64"))
MOST_KL = 0.02  # nats a token, mean over the domains
MOST_BYTES = 20_000_000

Rows = dict[str, NDArray[np.int64]]  # domain -> [W, T]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Trained weights beside the container, by domain, in nats a token.

    Attributes:
        trained, container: loss.
        kl: KL(trained || container).
        counter, counts: how the container routed, `[D, L, E]`.
    """

    trained: dict[str, float]
    container: dict[str, float]
    kl: dict[str, float]
    counter: atlas.RouteCounter
    counts: atlas.Counts

    @property
    def mean_kl(self) -> float:
        """The mean over domains."""
        return float(np.mean(list(self.kl.values())))


def bundle(work: Path, out: Path, limit: int, samples: int) -> None:
    """Convert, measure, and replace the folder `out`.

    Args:
        work: where the training worked.
        out: the folder of the bundled model.
        limit: stretches of held-out text that are scored in each domain.
        samples: continuations that the evaluation classifies.
    """
    trained, evaluation = refresh(work, limit, samples)
    train, held = corpus.load(work, "train"), corpus.load(work, "heldout")
    rows = {name: held_out.windows(tokens, limit) for name, tokens in held.items()}
    made, measured = choose(trained, work / "bundle", rows)
    say("5-gram model")
    ngram = Ngram(list(train.values()), 1 << 12)
    figures = {
        **facts_of(made),
        "sources": json.loads((work / "corpus.json").read_text("utf-8")),
        "training": evaluation["training"],
        "held_out": {
            name: table_row(measured, name, held_out.ngram_loss(ngram, part), part)
            for name, part in rows.items()
        },
        "mean_kl": measured.mean_kl,
        "balance": held_out.balance(
            measured.counts / np.maximum(measured.counts.sum(-1, keepdims=True), 1)
        ),
        "knock_out": evaluation["knock_out"],
        "samples": {
            kind: evaluation["samples"][kind] for kind in ("number", "right", "right_for_real_text")
        },
    }
    write(made, figures, measured, rows)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(made, out, ignore=shutil.ignore_patterns(".*"))  # heat is nobody's but ours
    say(f"{out}: {size_of(out) / 1e6:.1f} MB")


def refresh(work: Path, limit: int, samples: int) -> tuple[Path, dict[str, Any]]:
    """The float32 export and the evaluation of the last checkpoint, made where they are old."""
    trained, report = work / "export-f32", work / "evaluation.json"
    stamp = (work / "checkpoint.pt").stat().st_mtime
    if is_older(trained / "config.json", stamp):
        from tools.demo.export import export

        shutil.rmtree(trained, ignore_errors=True)
        export(work, trained, "float32")
    if is_older(report, stamp):
        from tools.demo.evaluate import evaluate

        evaluate(work, report, limit, samples)
    return trained, json.loads(report.read_text("utf-8"))


def is_older(path: Path, stamp: float) -> bool:
    """Whether a file is missing or was written before a time."""
    return not path.is_file() or path.stat().st_mtime < stamp


def choose(trained: Path, folder: Path, rows: Rows) -> tuple[Path, Measured]:
    """Convert with finer and finer formats until the container keeps to the limits."""
    for experts, down in EXPERTS:
        made = folder / f"{experts}-{down}"
        shutil.rmtree(made, ignore_errors=True)
        convert_model(trained, made, experts=experts, down=down, dense=DENSE)
        container = Checkpoint.open(made).container
        assert container is not None
        verify_container(container)
        measured = measure(trained, made, rows)
        nbytes = size_of(made)
        say(f"{experts}, {down}: {nbytes / 1e6:.1f} MB, KL {measured.mean_kl:.4f} nats")
        if measured.mean_kl <= MOST_KL and nbytes <= MOST_BYTES:
            return made, measured
    sys.exit(f"no format keeps KL <= {MOST_KL} nats within {MOST_BYTES} bytes")


def measure(trained: Path, made: Path, rows: Rows) -> Measured:
    """Feed both the same text and compare what they say on the scored positions."""
    losses: tuple[dict[str, float], dict[str, float]] = ({}, {})
    kl: dict[str, float] = {}
    counts = []
    with LLM.open(trained) as one, LLM.open(made) as two:
        counter = atlas.RouteCounter(two.prepared.description)
        for name, part in rows.items():
            total = np.zeros(3)
            for row in part:
                p = log_probabilities(one.logits(row[:-1]))
                q = log_probabilities(two.logits(row[:-1], routes=counter))
                at = (np.arange(held_out.CONTEXT), row[held_out.CONTEXT + 1 :])
                divergence = (np.exp(p) * (p - q)).sum(-1).mean()
                total += (-p[at].mean(), -q[at].mean(), divergence)
            losses[0][name], losses[1][name], kl[name] = (total / len(part)).tolist()
            counts.append(counter.take())
            say(f"{name}: {losses[0][name]:.4f} -> {losses[1][name]:.4f}, KL {kl[name]:.5f}")
    return Measured(*losses, kl, counter, np.stack(counts))


def log_probabilities(logits: NDArray[np.float32]) -> Floats:
    """Logits [T, V] -> log probabilities of the scored positions [CONTEXT, V]."""
    x = logits[held_out.CONTEXT :].astype(np.float64)
    x -= x.max(-1, keepdims=True)
    shifted: Floats = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return shifted


def table_row(
    measured: Measured, name: str, ngram: float, rows: NDArray[np.int64]
) -> dict[str, Any]:
    """What the card says of one domain."""
    loss = {
        "trained": measured.trained[name],
        "container": measured.container[name],
        "ngram": ngram,
    }
    return {
        "scored_tokens": len(rows) * held_out.CONTEXT,
        "loss": loss,
        "perplexity": {kind: math.exp(value) for kind, value in loss.items()},
        "kl": measured.kl[name],
    }


def facts_of(made: Path) -> dict[str, Any]:
    """What the container is: its files by hash, its shape, its formats."""
    description = Description.of(Checkpoint.open(made))
    facts = facts_of_model(description)
    for key in ("model", "num_files", "ignored_files"):
        del facts[key]
    gate, _, down = (part.format.name for part in description.experts.layers[0].parts)
    experts = gate if gate == down else f"{gate} (gate, up), {down} (down)"
    return {
        "schema": card.SCHEMA,
        "model": facts,
        "formats": {"experts": experts, "dense": DENSE},
        "files": atlas.weights_of(description),
    }


def write(made: Path, figures: dict[str, Any], measured: Measured, rows: Rows) -> None:
    """Put atlas, figures and card beside the container."""
    tokens = {name: len(part) * 2 * held_out.CONTEXT for name, part in rows.items()}
    found = atlas.atlas(measured.counter, tokens, measured.counts, figures["files"])
    atlas.write_json(made / atlas.FILE_NAME, found)
    atlas.write_json(made / card.FIGURES, figures)
    experts = atlas.table(list(rows), measured.counter.layers, measured.counts)
    with LLM.open(made) as llm:
        shown = card.continuations(llm)
    (made / card.CARD).write_text(card.text(figures, experts, shown), encoding="utf-8")


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.glob("[!.]*"))


def say(text: str) -> None:
    """Progress, for people."""
    print(text, flush=True)
