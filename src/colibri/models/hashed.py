"""Keys of experts scored by the root of a softplus; the first layers' are given by a table."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.kernels.api import Swiglu
from colibri.models.config import MoEConfig
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route

_HASHED, _CHOSEN = "hash_moe", "moe"
_USUAL = 3  # layers with a table, where no key says


@dataclass(frozen=True, kw_only=True)
class HashedMoEConfig(MoEConfig):
    """Every layer is sparse; `mlp_layer_types`, or `num_hash_layers`, says which have a table."""

    moe_intermediate_size: int
    n_shared_experts: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    num_hash_layers: int | None = None
    mlp_layer_types: tuple[str, ...] | None = None

    def check(self) -> None:
        """Scores are those that are computed; each layer has a known kind."""
        super().check()
        self.require(self.norm_topk_prob, "norm_topk_prob", "must be true")
        self.require(self.scoring_func == "sqrtsoftplus", "scoring_func", "must be sqrtsoftplus")
        self.require(self.topk_method == "noaux_tc", "topk_method", "must be noaux_tc")
        kinds = self.mlp_layer_types
        known = kinds is None or (
            len(kinds) == self.num_hidden_layers and {*kinds} <= {_HASHED, _CHOSEN}
        )
        self.require(known, "mlp_layer_types", f"must give each layer {_HASHED!r} or {_CHOSEN!r}")
        self.require(self.n_shared_experts > 0, "n_shared_experts", "must be positive")
        first = self.num_hash_layers
        self.require(first is None or first >= 0, "num_hash_layers", "must not be negative")
        agree = (
            first is None
            or kinds is None
            or all((kind == _HASHED) == (index < first) for index, kind in enumerate(kinds))
        )
        self.require(agree, "num_hash_layers", "and mlp_layer_types differ: remove one of them")

    def is_hashed(self, index: int) -> bool:
        """Whether the experts of layer `index` are given by the token."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[index] == _HASHED
        return index < (_USUAL if self.num_hash_layers is None else self.num_hash_layers)

    def feed_forward(self, index: int, swiglu: Swiglu) -> MoEFFN:
        """Of layer `index`; several shared experts are one that is as wide as all of them."""
        hashed = self.is_hashed(index)
        route = Route(
            normalize=True,
            scoring="sqrtsoftplus",
            choice_bias=not hashed,
            epsilon=1e-20,
            factor=self.routed_scaling_factor,
            vocab_size=self.vocab_size if hashed else None,
        )
        return MoEFFN.from_config(
            self,
            route,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.moe_intermediate_size * self.n_shared_experts,
            swiglu=swiglu,
        )
