"""Training of the demo model: one worker a core, parameters and moments in shared memory.

Each worker runs its share of the batch on one thread, adds up nothing over a network and waits
for nobody inside a layer (on a machine that others use, two threads in one kernel wait for each
other most of the time).  Gradients lie in one flat shared vector a worker; after a barrier each
worker averages and applies its own half of them.

The schedule follows the share of the budget that is spent, the larger of steps over `--steps` and
minutes over `--minutes`: warm-up, then linear decay to zero.  With steps alone a run is repeatable;
minutes bound it on a busy machine.  A resumed run goes on where it stopped, also in the schedule.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing
from torch.nn import functional

from tools.demo import corpus
from tools.demo.model import Config, Model, layers_of
from tools.demo.optimizer import Optimizer, bind, layout

PATIENCE = 900.0
"""Seconds a worker waits for the others before it gives up."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, besides the corpus and the budget."""

    seed: int = 20240
    tokens_a_step: int = 8192
    length: int = 512
    long_length: int = 1024
    long_every: int = 8
    peak: float = 3e-3
    muon_peak: float = 6e-3
    warm_steps: int = 100
    decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.02
    # Domains are drawn by the square root of their size; after these steps by these odds, which
    # favour those that a 5-gram model is best at: much repeats itself in code and manuals.
    mix_from: int = 600
    mix: tuple[tuple[str, float], ...] = (
        ("bible", 0.11),
        ("shakespeare", 0.11),
        ("melville", 0.06),
        ("austen", 0.08),
        ("speeches", 0.15),
        ("python", 0.24),
        ("german", 0.13),
        ("french", 0.12),
    )
    eval_every: int = 250
    eval_rows: int = 8


@dataclass
class Shared:
    """Vectors in shared memory; P parameters, W workers."""

    weights: Tensor  # fp32 [P]
    first: Tensor  # fp32 [P], Adam's mean
    second: Tensor  # fp32 [P], Adam's mean square
    grads: Tensor  # fp32 [W, P]
    control: Tensor  # fp64 [3]: go on, share of the peak rates, evaluate
    stats: Tensor  # fp64 [W, 6]
    held: Tensor  # fp64 [domains], held-out loss
    counters: Tensor  # fp64 [3]: steps, seconds, tokens

    @staticmethod
    def create(size: int, workers: int) -> Shared:
        """All zero."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype).share_memory_()

        f64 = torch.float64
        return Shared(
            zeros(size),
            zeros(size),
            zeros(size),
            zeros(workers, size),
            zeros(3, dtype=f64),
            zeros(workers, 6, dtype=f64),
            zeros(len(corpus.DOMAINS), dtype=f64),
            zeros(3, dtype=f64),
        )


def batch(data: dict[str, NDArray[np.uint16]], recipe: Recipe, step: int) -> Tensor:
    """The step's ids [B, T+1]; a function of the seed and the step alone."""
    rng = np.random.default_rng([recipe.seed, step])
    long = step % recipe.long_every == recipe.long_every - 1
    length = recipe.long_length if long else recipe.length
    names = list(data)
    if step < recipe.mix_from:
        odds = np.sqrt([len(data[name]) for name in names])
    else:
        odds = np.asarray([dict(recipe.mix)[name] for name in names])
    rows = recipe.tokens_a_step // length
    # Systematic sampling: each batch holds every domain as nearly in proportion as it can.
    at = (np.arange(rows) + rng.random()) / rows
    picks = np.searchsorted(np.cumsum(odds / odds.sum()), at).clip(max=len(names) - 1)
    out = np.empty((rows, length + 1), dtype=np.int64)
    for row, pick in zip(out, rng.permutation(picks), strict=True):
        tokens = data[names[pick]]
        start = int(rng.integers(0, len(tokens) - length))
        row[:] = tokens[start : start + length + 1]
    return torch.from_numpy(out)


def windows(tokens: NDArray[np.uint16], rows: int, length: int) -> Iterator[Tensor]:
    """`rows` stretches evenly spaced over the tokens, each ids [1, length+1]."""
    for start in np.linspace(0, len(tokens) - length - 1, rows).astype(int):
        yield torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))[None]


@torch.no_grad()
def held_out_loss(model: Model, tokens: NDArray[np.uint16], rows: int, length: int) -> float:
    """Mean loss in nats a token over evenly spaced stretches."""
    model.eval()
    total = 0.0
    for ids in windows(tokens, rows, length):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1])
        total += float(functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()))
    model.train()
    return total / rows


def keep_memory() -> None:
    """Have the C library keep freed memory: fresh pages cost a tenth of a step."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back


def worker(rank: int, workers: int, work: Path, c: Config, recipe: Recipe, shared: Shared,
           barrier: Barrier, boss: Boss | None) -> None:  # fmt: skip
    """Run steps until told to stop; the boss (rank 0) also schedules, logs and saves."""
    torch.set_num_threads(1)
    keep_memory()
    if boss is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    data, held = corpus.load(work, "train"), corpus.load(work, "heldout")
    model = Model(c).train()
    grads = shared.grads[rank]
    bind(model, shared.weights, grads)
    moments = (shared.first, shared.second)
    optimizer = Optimizer(model, shared.weights, *moments, rank, workers, recipe.decay)
    while True:
        if boss is not None:
            boss.plan()
        barrier.wait(PATIENCE)
        go, rate, evaluate = shared.control.tolist()
        if evaluate:
            for i, name in enumerate(corpus.DOMAINS):
                if i % workers == rank:
                    loss = held_out_loss(model, held[name], recipe.eval_rows, recipe.length)
                    shared.held[i] = loss
            barrier.wait(PATIENCE)
        if not go:
            break
        grads.zero_()
        step = int(shared.counters[0])
        ids = batch(data, recipe, step)[rank::workers]
        with torch.autocast("cpu", torch.bfloat16):
            loss, balance = model.losses(ids)
        (loss + recipe.balance * balance).backward()
        relative = torch.stack([layer.share for layer in layers_of(model)]) * c.num_experts
        figures = [loss.item(), balance.item(), relative.max(), relative.std(-1).mean()]
        shared.stats[rank, :4] = torch.tensor(figures, dtype=torch.float64)
        barrier.wait(PATIENCE)
        mine = optimizer.gradients(shared.grads)
        shared.stats[rank, 4] = sum(float(g.square().sum()) for g in mine)
        barrier.wait(PATIENCE)
        norm = float(shared.stats[:, 4].sum()) ** 0.5
        scale = min(1.0, recipe.clip / (norm + 1e-9))
        if np.isfinite(norm):
            rates = (rate * recipe.peak, rate * recipe.muon_peak)
            optimizer.step([g.mul_(scale) for g in mine], step + 1, *rates)
        if boss is not None:
            boss.done(norm)


class Boss:
    """What only the first worker does: the schedule, the log, the checkpoints, the signals."""

    def __init__(self, work: Path, c: Config, recipe: Recipe, shared: Shared,
                 minutes: float, steps: int) -> None:  # fmt: skip
        self.work, self.c, self.recipe, self.shared = work, c, recipe, shared
        self.minutes, self.steps = minutes, steps
        self.stopping = False
        self.saved = self.last = time.monotonic()
        self.losses: list[float] = []
        self.reported = (time.monotonic(), float(shared.counters[2]))
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def progress(self) -> float:
        """Share of the budget spent, 0 to 1."""
        steps, seconds, _ = self.shared.counters.tolist()
        by_steps = steps / self.steps if self.steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return float(max(by_steps, by_time))

    def plan(self) -> None:
        """Before a step: learning rate, whether to evaluate, whether to stop."""
        now = time.monotonic()
        self.shared.counters[1] += now - self.last
        self.last = now
        step, done = int(self.shared.counters[0]), self.progress()
        stop = self.stopping or done >= 1.0
        rate = min(1.0, (step + 1) / self.recipe.warm_steps) * (1 - done)
        due = step % self.recipe.eval_every == 0 or done >= 1.0
        self.shared.control[:] = torch.tensor([not stop, max(rate, 0.0), due and step > 0])
        if stop or now - self.saved > 300:
            self.save()

    def done(self, norm: float) -> None:
        """After a step: count it and, now and then, report it."""
        self.shared.counters[0] += 1
        self.shared.counters[2] += self.recipe.tokens_a_step
        step, _, tokens = self.shared.counters.tolist()
        loss, balance, top, spread = self.shared.stats.mean(0).tolist()[:4]
        self.losses.append(loss)
        if step % 25 == 0:
            now, before = time.monotonic(), self.reported
            self.log(
                "step",
                step=int(step),
                share=round(self.progress(), 4),
                tokens=int(tokens),
                loss=round(sum(self.losses) / len(self.losses), 4),
                balance=round(balance, 4),
                heaviest=round(top, 3),
                spread=round(spread, 4),
                norm=round(norm, 3),
                rate=round(float(self.shared.control[1]), 6),
                speed=round((tokens - before[1]) / (now - before[0])),
            )
            self.losses, self.reported = [], (now, tokens)
        if self.shared.control[2]:
            self.report_held_out()

    def report_held_out(self) -> None:
        """Log the held-out loss of every domain."""
        held = dict(zip(corpus.DOMAINS, self.shared.held.tolist(), strict=True))
        mean = sum(held.values()) / len(held)
        rounded = {name: round(loss, 4) for name, loss in held.items()}
        step = int(self.shared.counters[0])
        self.log("heldout", step=step, mean=round(mean, 4), **rounded)

    def log(self, kind: str, **fields: float) -> None:
        """One line to the screen and to `train.log`, one object to `metrics.jsonl`."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        line = f"{stamp} {kind} " + " ".join(f"{k}={v}" for k, v in fields.items())
        print(line, flush=True)
        with (self.work / "train.log").open("a") as file:
            file.write(line + "\n")
        with (self.work / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"time": stamp, "kind": kind, **fields}) + "\n")

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace it."""
        steps, seconds, tokens = self.shared.counters.tolist()
        state = {
            "config": asdict(self.c),
            "recipe": asdict(self.recipe),
            "weights": self.shared.weights.clone(),
            "first": self.shared.first.clone(),
            "second": self.shared.second.clone(),
            "counters": [steps, seconds, tokens],
            "budget": {"minutes": self.minutes, "steps": self.steps},
        }
        path = self.work / "checkpoint.pt"
        with path.with_suffix(".tmp").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)
        self.saved = time.monotonic()
        self.log("saved", step=int(steps), minutes=round(seconds / 60, 2))


def train(work: Path, minutes: float, steps: int, workers: int, fresh: bool) -> None:
    """Train from the checkpoint if there is one, else from new weights."""
    c, recipe = Config(), Recipe()
    model = Model(c)
    places, total = layout(model)
    shared = Shared.create(total, workers)
    model.initialise(torch.Generator().manual_seed(recipe.seed))
    parameters = dict(model.named_parameters())
    for place in places:
        shared.weights[place.span] = parameters[place.name].detach().flatten()
    path = work / "checkpoint.pt"
    if path.exists() and not fresh:
        state = torch.load(path, weights_only=True)
        if state["config"] != asdict(c):
            sys.exit("the checkpoint has another configuration: use --fresh or another --work")
        shared.weights[:], shared.first[:] = state["weights"], state["first"]
        shared.second[:] = state["second"]
        shared.counters[:] = torch.tensor(state["counters"], dtype=torch.float64)
    boss = Boss(work, c, recipe, shared, minutes, steps)
    boss.log("start", parameters=total, step=int(shared.counters[0]), workers=workers)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    crew = []
    for rank in range(1, workers):
        arguments = (rank, workers, work, c, recipe, shared, barrier, None)
        crew.append(context.Process(target=worker, args=arguments, daemon=True))
        crew[-1].start()
    worker(0, workers, work, c, recipe, shared, barrier, boss)
    if shared.control[2]:
        boss.report_held_out()
    for process in crew:
        process.join(30)
    boss.log("end", step=int(shared.counters[0]), share=round(boss.progress(), 4))
