"""The update of the demo model's weights: Muon for matrices, AdamW for the rest.

Muon takes the momentum of a matrix's gradient to (nearly) the nearest orthogonal matrix before it
is applied, by a few Newton-Schulz steps; 0.2 sqrt(longer side) gives it the size of an Adam step.
It learns from fewer tokens than AdamW, at about a tenth more time a step here.

The weights, both moments and the gradients are flat vectors [P] that several workers share: each
worker updates its own share of every group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.demo.model import Model

MUON = frozenset({"q.weight", "k.weight", "v.weight", "o.weight", "gate_up", "down"})


@dataclass(frozen=True)
class Place:
    """A parameter's stretch of the flat vector, and the matrices it is made of."""

    name: str
    span: slice
    matrices: tuple[int, int, int] | None  # number, rows, columns; None: AdamW's
    decays: bool


def layout(model: Model) -> tuple[list[Place], int]:
    """Where each parameter lies, and how many numbers there are."""
    places, at = [], 0
    for name, p in model.named_parameters():
        matrices = None
        short = name.split(".", 2)[-1]
        if short in MUON:
            rows, columns = p.shape[-2:]
            # Gate and up lie in one tensor but are two matrices.
            number = p.numel() // (rows * columns) * (2 if short == "gate_up" else 1)
            matrices = (number, p.numel() // number // columns, columns)
        places.append(Place(name, slice(at, at + p.numel()), matrices, p.dim() >= 2))
        at += p.numel()
    return places, at


def bind(model: Model, weights: Tensor, grads: Tensor | None) -> None:
    """Make the parameters (and gradients) views of flat vectors [P]."""
    parameters = dict(model.named_parameters())
    for place in layout(model)[0]:
        p = parameters[place.name]
        p.data = weights[place.span].view(p.shape)
        if grads is not None:
            p.grad = grads[place.span].view(p.shape)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """g [N, rows, columns] -> matrices whose singular values are all near one, in bf16."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).bfloat16() + 1e-7)
    for _ in range(steps):
        a = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.transpose(1, 2) if tall else x


@dataclass(frozen=True)
class Piece:
    """What one worker updates of one parameter."""

    span: slice
    matrices: tuple[int, int, int] | None
    decay: float


class Optimizer:
    """One worker's share; `first` and `second` [P] are the moments."""

    def __init__(self, model: Model, weights: Tensor, first: Tensor, second: Tensor,
                 rank: int, workers: int, decay: float) -> None:  # fmt: skip
        self.weights, self.first, self.second = weights, first, second
        self.pieces: list[Piece] = []
        singles = 0
        for place in layout(model)[0]:
            start, size = place.span.start, place.span.stop - place.span.start
            number, rows, columns = place.matrices or (size, 1, 1)
            if number == 1:  # dealt out whole, in turn
                singles += 1
                low, high = (0, 1) if singles % workers == rank else (0, 0)
            else:
                low, high = number * rank // workers, number * (rank + 1) // workers
            if high > low:
                unit = rows * columns
                span = slice(start + low * unit, start + high * unit)
                matrices = (high - low, rows, columns) if place.matrices else None
                self.pieces.append(Piece(span, matrices, decay if place.decays else 0.0))

    def gradients(self, grads: Tensor) -> list[Tensor]:
        """grads [W, P] -> the workers' mean, for each of this worker's pieces."""
        return [grads[:, piece.span].mean(0) for piece in self.pieces]

    def step(self, grads: list[Tensor], number: int, rate: float, muon_rate: float) -> None:
        """Apply the gradients as step `number`, counted from 1."""
        for piece, g in zip(self.pieces, grads, strict=True):
            w, m = self.weights[piece.span], self.first[piece.span]
            if piece.matrices:
                m.lerp_(g, 0.05)
                update = orthogonal(g.lerp_(m, 0.95).view(piece.matrices)).reshape(-1)
                w.mul_(1 - muon_rate * piece.decay)
                w.add_(update, alpha=-muon_rate * 0.2 * max(piece.matrices[1:]) ** 0.5)
            else:
                v = self.second[piece.span]
                m.lerp_(g, 0.1)
                v.mul_(0.95).addcmul_(g, g, value=0.05)
                size = (v / (1 - 0.95**number)).sqrt_().add_(1e-8)
                w.mul_(1 - rate * piece.decay)
                w.addcdiv_(m, size, value=-rate / (1 - 0.9**number))
