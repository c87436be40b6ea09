"""The experts of DeepSeek-V3 and its many relatives: sigmoid scores, a bias in the choice, groups.

The bias balances load without an auxiliary loss, hence the name (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from colibri.errors import UnsupportedModelError
from colibri.kernels.api import PLAIN, Swiglu
from colibri.models.config import MoEConfig
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route

_DENSE, _SPARSE = "dense", "sparse"
SHARED_EXPERTS = ((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),)
SHARED_EXPERT_AS_PUBLISHED = ((".mlp.shared_expert.", ".mlp.shared_experts."),)


@dataclass(frozen=True, kw_only=True)
class NoauxMoEConfig(MoEConfig):
    """The first layers are dense; `mlp_layer_types` says which, where it is given."""

    intermediate_size: int
    moe_intermediate_size: int
    n_shared_experts: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    mlp_layer_types: tuple[str, ...] | None = None
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"

    route_epsilon: ClassVar[float] = 1e-20
    routings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
    }

    def check(self) -> None:
        """Groups divide the experts and hold enough of them; each layer has a known kind."""
        super().check()
        fits = 0 < self.topk_group <= self.n_group and self.num_experts % self.n_group == 0
        self.require(fits, "n_group", "must divide num_experts and be at least topk_group")
        size = self.num_experts // self.n_group
        enough = self.topk_group * size >= self.num_experts_per_tok
        self.require(enough, "topk_group", "holds fewer experts than num_experts_per_tok")
        self.require(self.n_group == 1 or size >= 2, "n_group", "leaves groups of one expert")
        self.require((self.n_shared_experts or 0) >= 0, "n_shared_experts", "is negative")
        self.require(self.first_k_dense_replace >= 0, "first_k_dense_replace", "is negative")
        kinds = self.mlp_layer_types
        known = kinds is None or (
            len(kinds) == self.num_hidden_layers and {*kinds} <= {_DENSE, _SPARSE}
        )
        self.require(known, "mlp_layer_types", f"must give each layer {_DENSE!r} or {_SPARSE!r}")
        for key, known_values in self.routings.items():
            if getattr(self, key) not in known_values:
                raise UnsupportedModelError(
                    f"config.json: {key} = {getattr(self, key)!r} is not implemented for "
                    f"{self.model_type!r}; known are {', '.join(known_values)}"
                )
        self.require(self.moe_layer_freq == 1, "moe_layer_freq", "must be 1")

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has routed experts; what drafts behind the last always has."""
        if self.mlp_layer_types is not None and index < self.num_hidden_layers:
            return self.mlp_layer_types[index] == _SPARSE
        return index >= self.first_k_dense_replace

    @property
    def swiglu(self) -> Swiglu:
        """The activation of every feed-forward."""
        return PLAIN

    @property
    def route(self) -> Route:
        """Sigmoid, biased choice inside the best groups."""
        return Route(
            normalize=self.norm_topk_prob,
            scoring="sigmoid",
            choice_bias=True,
            num_groups=self.n_group,
            num_groups_used=self.topk_group,
            epsilon=self.route_epsilon,
            factor=self.routed_scaling_factor,
        )

    def feed_forward(self, index: int) -> DenseFFN | MoEFFN:
        """Of layer `index`; several shared experts are one that is as wide as all of them."""
        if not self.is_sparse(index):
            return DenseFFN.from_config(self, swiglu=self.swiglu)
        return MoEFFN.from_config(
            self,
            self.route,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.moe_intermediate_size * (self.n_shared_experts or 0),
            swiglu=self.swiglu,
        )
