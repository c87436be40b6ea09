"""What the demo model has to show, measured on its held-out text and written as one JSON file.

* loss by domain, beside the 5-gram model's on the very same positions;
* the domain a bag-of-words classifier gives to samples prompted from each domain;
* what knocking out a domain's ten most used experts costs, beside ten others of equal heat;
* how evenly the experts are used, and how much each serves each domain;
* the divergence that rounding the expert weights to four bits causes.

Shapes: D domains, L layers, E experts, W windows, T positions.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.demo import corpus, export, held_out
from tools.demo.held_out import CONTEXT
from tools.demo.model import Model, layers_of
from tools.demo.ngram import Ngram

KNOCKED = 10
PROMPT = 32
SAMPLE = 100


@dataclass(frozen=True)
class Windows:
    """Stretches of a domain's held-out text; the second half of each is scored."""

    ids: Tensor  # [W, 2 * CONTEXT + 1]

    @staticmethod
    def of(tokens: NDArray[np.uint16], limit: int) -> Windows:
        """At most `limit` stretches, evenly spaced, their scored parts disjoint."""
        return Windows(torch.from_numpy(held_out.windows(tokens, limit)))

    def ngram_loss(self, ngram: Ngram) -> float:
        """Loss of the n-gram model on the scored positions, nats a token."""
        return held_out.ngram_loss(ngram, self.ids.numpy())


@torch.no_grad()
def logits_of(model: Model, ids: Tensor) -> Tensor:
    """ids [1, 2 * CONTEXT + 1] -> log probabilities of the scored positions [CONTEXT, V]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
    return logits[0, CONTEXT:].float().log_softmax(-1)


def loss_of(model: Model, windows: Windows, usage: NDArray[np.int64] | None = None) -> float:
    """Mean loss over the scored positions; adds the experts chosen there to usage [L, E]."""
    total = 0.0
    for row in windows.ids:
        ids = row[None]
        target = ids[0, CONTEXT + 1 :, None]
        total -= float(logits_of(model, ids).gather(1, target).mean())
        if usage is not None:
            for i, layer in enumerate(layers_of(model)):
                assert layer.chosen is not None
                chosen = layer.chosen[CONTEXT:].flatten()
                usage[i] += torch.bincount(chosen, minlength=usage.shape[1]).numpy()
    return total / len(windows.ids)


# ------------------------------------------------------------------------------- knocking out


@contextmanager
def knocked_out(model: Model, pairs: list[tuple[int, int]]) -> Iterator[None]:
    """Bar these (layer, expert) pairs from being chosen; the router falls back on others."""
    for layer, expert in pairs:
        block = layers_of(model)[layer]
        if block.barred is None:
            block.barred = torch.zeros(model.c.num_experts, dtype=torch.bool)
        block.barred[expert] = True
    try:
        yield
    finally:
        for block in layers_of(model):
            block.barred = None


def rivals(
    own: NDArray[np.float64], heat: NDArray[np.float64]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """A domain's most used pairs and as many others of the same layers and the nearest heat.

    own [L, E] is the domain's usage, heat [L, E] the usage over all domains.
    """
    experts = own.shape[1]
    top = [divmod(int(i), experts) for i in np.argsort(-own, axis=None)[:KNOCKED]]
    taken = set(top)
    others: list[tuple[int, int]] = []
    # The hottest choose first: they have the fewest neighbours.
    for layer, expert in sorted(top, key=lambda pair: -heat[pair]):
        free = [(layer, e) for e in range(experts) if (layer, e) not in taken]
        best = min(free, key=lambda pair: abs(heat[pair] - heat[layer, expert]))
        taken.add(best)
        others.append(best)
    return top, others


def knock_out(
    model: Model, windows: dict[str, Windows], usage: NDArray[np.float64], base: dict[str, float]
) -> dict[str, Any]:
    """Loss added in each domain's text by barring its own favourites, and by barring rivals."""
    heat, table = usage.mean(0), {}
    for i, name in enumerate(corpus.DOMAINS):
        top, others = rivals(usage[i], heat)
        row: dict[str, Any] = {}
        for kind, pairs in (("own", top), ("others", others)):
            with knocked_out(model, pairs):
                row[kind] = loss_of(model, windows[name]) - base[name]
            row[f"{kind}_pairs"] = pairs
            row[f"{kind}_heat"] = float(np.mean([heat[p] for p in pairs]))
        table[name] = row
        print(f"knock-out {name}: own {row['own']:+.4f}, others {row['others']:+.4f}", flush=True)
    won = sum(row["own"] > row["others"] for row in table.values())
    return {"pairs": KNOCKED, "won": won, "of": len(table), "domains": table}


# ------------------------------------------------------------------------------------ samples


def words_of(text: str) -> list[str]:
    """Lower-case words, no digits or marks."""
    return re.findall(r"[^\W\d_]+", text.lower())


class BagOfWords:
    """Naive Bayes over word counts with add-a-tenth smoothing and equal priors."""

    def __init__(self, texts: dict[str, str]) -> None:
        counts = {name: Counter(words_of(text)) for name, text in texts.items()}
        self.vocabulary = len(set().union(*counts.values()))
        self.counts = counts
        self.totals = {name: sum(c.values()) + 0.1 * self.vocabulary for name, c in counts.items()}

    def classify(self, text: str) -> str:
        """The likeliest domain."""
        words = words_of(text)

        def score(name: str) -> float:
            own = self.counts[name]
            return sum(math.log((own[w] + 0.1) / self.totals[name]) for w in words)

        return max(self.counts, key=score)


@torch.no_grad()
def sample(model: Model, prompts: Tensor, generator: torch.Generator, end: int) -> Tensor:
    """prompts [B, PROMPT] -> continuations [B, SAMPLE]; temperature 0.8, top-p 0.95, no end."""
    ids = prompts
    for _ in range(SAMPLE):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)[:, -1].float() / 0.8
        logits[:, end] = float("-inf")
        p, order = logits.softmax(-1).sort(descending=True, dim=-1)
        p[p.cumsum(-1) - p > 0.95] = 0.0
        pick = torch.multinomial(p, 1, generator=generator)
        ids = torch.cat([ids, order.gather(1, pick)], dim=1)
    return ids[:, PROMPT:]


def classify_samples(
    model: Model, work: Path, held: dict[str, NDArray[np.uint16]], number: int
) -> dict[str, Any]:
    """Prompt with held-out text of each domain in turn and classify what comes after."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(corpus.END)
    texts = {d: (work / f"corpus/{d}.train.txt").read_text("utf-8") for d in corpus.DOMAINS}
    judge = BagOfWords(texts)
    rng = np.random.default_rng(corpus.SEED)
    names = [corpus.DOMAINS[i % len(corpus.DOMAINS)] for i in range(number)]
    prompts, real = np.empty((number, PROMPT), dtype=np.int64), 0
    for row, name in zip(prompts, names, strict=True):
        tokens = held[name]
        while True:
            start = int(rng.integers(0, len(tokens) - PROMPT - SAMPLE))
            stretch = tokens[start : start + PROMPT + SAMPLE]
            if end not in stretch:
                break
        row[:] = stretch[:PROMPT]
        real += judge.classify(tokenizer.decode(stretch[PROMPT:].tolist())) == name
    generator = torch.Generator().manual_seed(corpus.SEED)
    out = sample(model, torch.from_numpy(prompts), generator, end)
    rows, right = [], 0
    for name, prompt, tokens in zip(names, prompts, out, strict=True):
        text = tokenizer.decode(tokens.tolist())
        said = judge.classify(text)
        right += said == name
        given = tokenizer.decode(prompt.tolist())
        rows.append({"domain": name, "classified": said, "prompt": given, "text": text})
    print(f"samples: {right} of {number} in their domain (real text: {real})", flush=True)
    return {"number": number, "right": right, "right_for_real_text": real, "samples": rows}


# ---------------------------------------------------------------------------------- rounding


def rounded(w: Tensor, group: int = 64) -> Tensor:
    """Weights rounded to four bits, -8 to 7 times an f16 scale for each `group` in a row."""
    parts = w.unflatten(-1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / 7).half().float().clamp_min(1e-8)
    return ((parts / scale).round().clamp(-8, 7) * scale).flatten(-2)


def rounding(model: Model, work: Path, windows: dict[str, Windows]) -> dict[str, float]:
    """Mean divergence, in nats, of the model with rounded experts from the model itself."""
    other, _ = export.load(work)
    for layer in layers_of(other):
        layer.gate_up.data = rounded(layer.gate_up.data)
        layer.down.data = rounded(layer.down.data)
    out = {}
    for name, part in windows.items():
        total = []
        for row in part.ids[::8]:
            p, q = logits_of(model, row[None]), logits_of(other, row[None])
            total.append(float((p.exp() * (p - q)).sum(-1).mean()))
        out[name] = float(np.mean(total))
    out["mean"] = float(np.mean(list(out.values())))
    print(f"rounding experts to int4-g64: {out['mean']:.4f} nats", flush=True)
    return out


# ------------------------------------------------------------------------------------- report


def evaluate(work: Path, out: Path, limit: int, number: int) -> None:
    """Measure everything on the last checkpoint and write the report."""
    model, facts = export.load(work)
    train, held = corpus.load(work, "train"), corpus.load(work, "heldout")
    windows = {name: Windows.of(tokens, limit) for name, tokens in held.items()}
    # Usage is counted on every second window and knocking out is judged on the others.
    counted = {name: Windows(w.ids[::2]) for name, w in windows.items()}
    judged = {name: Windows(w.ids[1::2]) for name, w in windows.items()}
    usage = np.zeros((len(held), len(model.layers), model.c.num_experts), dtype=np.int64)
    together = Ngram(list(train.values()), model.c.vocab_size)
    table: dict[str, Any] = {}
    base: dict[str, float] = {}
    for i, name in enumerate(corpus.DOMAINS):
        w = windows[name]
        base[name] = loss_of(model, judged[name])
        a, b = loss_of(model, counted[name], usage[i]), base[name]
        loss = (a * len(counted[name].ids) + b * len(judged[name].ids)) / len(w.ids)
        alone = w.ngram_loss(Ngram([train[name]], model.c.vocab_size))
        row = {"model": loss, "ngram": w.ngram_loss(together), "ngram_of_domain_only": alone}
        table[name] = {
            "scored_tokens": len(w.ids) * CONTEXT,
            "loss": row,
            "perplexity": {kind: math.exp(value) for kind, value in row.items()},
        }
        shown = ", ".join(f"{k} {v:.4f}" for k, v in row.items())
        print(f"loss {name}: {shown}", flush=True)
    shares = usage / usage.sum(-1, keepdims=True)
    report = {
        "training": facts,
        "held_out": table,
        "beats_ngram": all(r["loss"]["model"] < r["loss"]["ngram"] for r in table.values()),
        "balance": held_out.balance(shares),
        "knock_out": knock_out(model, judged, shares, base),
        "rounding_kl": rounding(model, work, windows),
        "samples": classify_samples(model, work, held, number),
        "domains": list(corpus.DOMAINS),
        "usage": usage.tolist(),
    }
    out.write_text(json.dumps(report, ensure_ascii=False) + "\n", "utf-8")
    print(out)
