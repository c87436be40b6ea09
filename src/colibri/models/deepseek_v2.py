"""DeepSeek-V2 and its Lite: softmax scores, weights never renormalised, groups by their best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from colibri.models.family import Family
from colibri.models.gguf_names import Keys
from colibri.models.latent import TINY, YARN, LatentMoEConfig, latent_gguf, latent_layer
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS
from colibri.nn.route import Route

_GREEDY, _GROUPS = "greedy", "group_limited_greedy"


@dataclass(frozen=True, kw_only=True)
class Config(LatentMoEConfig):
    """`norm_topk_prob` is not used: weights are softmax scores times `routed_scaling_factor`."""

    topk_method: str = _GREEDY
    scoring_func: str = "softmax"

    routings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "topk_method": (_GREEDY, _GROUPS),
        "scoring_func": ("softmax",),
    }

    @property
    def route(self) -> Route:
        """A group is as good as its best expert; without the group method there are none."""
        grouped = self.topk_method == _GROUPS
        return Route(
            normalize=False,
            num_groups=self.n_group if grouped else 1,
            num_groups_used=self.topk_group if grouped else 1,
            group_top=1,
            factor=self.routed_scaling_factor,
        )


def _is_plain(keys: Keys) -> bool:
    """Whether a GGUF file says nothing of groups of experts."""
    return (keys.get("expert_group_count") or 1) == 1


FAMILY = Family(
    model_type="deepseek_v2",
    config=Config,
    layer=latent_layer,
    rename=SHARED_EXPERTS,
    unrename=SHARED_EXPERT_AS_PUBLISHED,
    gguf=(
        latent_gguf(lambda keys: keys.get("expert_gating_func") in (None, 1) and _is_plain(keys)),
        latent_gguf(lambda keys: keys.get("expert_gating_func") in (None, 1), topk_method=_GROUPS),
    ),
    dialect="tool-sections",
    tiny={
        **TINY,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "topk_method": _GROUPS,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
)
