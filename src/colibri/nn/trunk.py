"""What stands before a model's first layer and behind its last."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.formats import Floats
from colibri.kernels.api import Head, Kernels, Matrix
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights
from colibri.nn.sublayer import Step

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FINAL_NORM = "model.norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Embedding, final norm, output projection.

    Attributes:
        tied: whether the embedding is the output projection too.
    """

    vocab_size: int
    hidden_size: int
    norm: RMSNorm
    tied: bool

    def first_parameters(self) -> list[Parameter]:
        """Tensors before the layers."""
        return [Parameter(EMBEDDING, (self.vocab_size, self.hidden_size), "embedding")]

    def last_parameters(self) -> list[Parameter]:
        """Tensors behind them."""
        norm = self.norm.parameter(_FINAL_NORM, self.hidden_size)
        head = Parameter(LM_HEAD, (self.vocab_size, self.hidden_size), "matrix")
        return [norm] if self.tied else [norm, head]

    def bind(self, weights: Weights) -> BoundTrunk:
        """Join it to its weights."""
        embedding = weights.matrix(EMBEDDING)
        lm_head = embedding if self.tied else weights.matrix(LM_HEAD)
        return BoundTrunk(embedding, Head(self.norm.bind(weights, _FINAL_NORM), lm_head))


@dataclass(frozen=True, slots=True, eq=False)
class BoundTrunk:
    """A trunk, ready to compute."""

    embedding: Matrix
    head: Head

    def embed(self, step: Step) -> Floats:
        """The residual stream `[T, D]` of the step's tokens."""
        return step.kernels.embed(self.embedding, step.ids)

    def logits(self, kernels: Kernels, x: Floats) -> Floats:
        """Logits `[R, V]` of rows `x [R, D]` of the stream."""
        return kernels.head_step(self.head, x)
