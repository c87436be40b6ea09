"""Keys of models with several residual streams (hyper-connections), and of their clamped SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.kernels.api import PLAIN, Swiglu
from colibri.models.config import BaseConfig
from colibri.nn.hyper import HyperTrunk, Streams

_MOST_STREAMS, _MOST_ITERATIONS = 16, 1000
STREAMS = ((r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),)
STREAMS_AS_PUBLISHED = ((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"))


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(BaseConfig):
    """How many streams, and how they are mixed."""

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    swiglu_limit: float | None = 10.0

    def check(self) -> None:
        """Counts are positive and not absurd."""
        super().check()
        for key, most in (("hc_mult", _MOST_STREAMS), ("hc_sinkhorn_iters", _MOST_ITERATIONS)):
            self.require(0 < getattr(self, key) <= most, key, f"must be 1 to {most}")
        self.require(self.hc_eps >= 0, "hc_eps", "must not be negative")
        limit = self.swiglu_limit
        self.require(limit is None or limit > 0, "swiglu_limit", "must be positive")

    @property
    def streams(self) -> Streams:
        """The streams of the model."""
        return Streams.from_config(self)

    @property
    def swiglu(self) -> Swiglu:
        """The activation of every feed-forward."""
        return PLAIN if self.swiglu_limit is None else Swiglu(limit=self.swiglu_limit)


def weighed_trunk(cfg: StreamsConfig) -> HyperTrunk:
    """Streams end in a sum that a mix of their own weighs."""
    return HyperTrunk(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        norm=cfg.norm,
        tied=cfg.tie_word_embeddings,
        streams=cfg.streams,
        head="weighed",
    )


def mean_trunk(cfg: StreamsConfig) -> HyperTrunk:
    """Streams end in their mean."""
    return HyperTrunk(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        norm=cfg.norm,
        tied=cfg.tie_word_embeddings,
        streams=cfg.streams,
        head="mean",
    )
