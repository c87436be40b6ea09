"""What stands before a model's first layer and behind its last."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Head, Kernels, Matrix, Norm
from colibri.kernels.recurrent_api import GroupNorm
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights
from colibri.nn.sublayer import Step

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FINAL_NORM, _EMBEDDING_NORM = "model.norm", "model.embed_tokens.embed_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Embedding, final norm, output projection.

    Attributes:
        tied: whether the embedding is the output projection too.
        embedding_norm: whether embeddings are normed.
        divisor: what the last norm's output is divided by.
        num_logits: logits that count; None where all do.
        final_norm: whether there is a norm before the output projection.
    """

    vocab_size: int
    hidden_size: int
    norm: RMSNorm
    tied: bool
    embedding_norm: bool = False
    divisor: float = 1.0
    num_logits: int | None = None
    final_norm: bool = True

    def first_parameters(self) -> list[Parameter]:
        """Tensors before the layers."""
        embedding = Parameter(EMBEDDING, (self.vocab_size, self.hidden_size), "embedding")
        norm = self.norm.parameter(_EMBEDDING_NORM, self.hidden_size)
        return [embedding, norm] if self.embedding_norm else [embedding]

    def last_parameters(self) -> list[Parameter]:
        """Tensors behind them."""
        found = []
        if self.final_norm:
            found.append(self.norm.parameter(_FINAL_NORM, self.hidden_size))
        if not self.tied:
            found.append(Parameter(LM_HEAD, (self.vocab_size, self.hidden_size), "matrix"))
        return found

    def bind(self, weights: Weights) -> BoundTrunk:
        """Join it to its weights."""
        embedding = weights.matrix(EMBEDDING)
        lm_head = embedding if self.tied else weights.matrix(LM_HEAD)
        head = Head(self._last_norm(weights), lm_head)
        return BoundTrunk(embedding, head, self._first_norm(weights), self.num_logits)

    def _last_norm(self, weights: Weights) -> Norm | None:
        if not self.final_norm:
            return None
        norm = self.norm.bind(weights, _FINAL_NORM)
        return norm if self.divisor == 1 else Norm(norm.weight / np.float32(self.divisor), norm.eps)

    def _first_norm(self, weights: Weights) -> GroupNorm | None:
        if not self.embedding_norm:
            return None
        norm = self.norm.bind(weights, _EMBEDDING_NORM)
        return GroupNorm(self.hidden_size, norm.eps, norm.weight)


@dataclass(frozen=True, slots=True, eq=False)
class BoundTrunk:
    """A trunk, ready to compute.

    Attributes:
        first_norm: of embeddings, or None.
    """

    embedding: Matrix
    head: Head
    first_norm: GroupNorm | None = None
    num_logits: int | None = None

    def embed(self, step: Step) -> Floats:
        """The residual stream `[T, D]` of the step's tokens."""
        x = step.kernels.embed(self.embedding, step.ids)
        return x if self.first_norm is None else step.kernels.norm_rows(self.first_norm, x)

    def behind(self, norm: Norm) -> BoundTrunk:
        """The same with another last norm."""
        return replace(self, head=Head(norm, self.head.lm_head))

    def logits(self, kernels: Kernels, x: Floats) -> Floats:
        """Logits `[R, V]` of rows `x [R, D]` of the stream."""
        logits = kernels.head_step(self.head, x)
        return logits if self.num_logits is None else logits[:, : self.num_logits].copy()
