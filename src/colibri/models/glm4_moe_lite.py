"""GLM-4.7-Flash: DeepSeek-V3's layers, small."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.family import Family
from colibri.models.latent import TINY, LatentMoEConfig, latent_layer
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Config(LatentMoEConfig):
    """One dense layer unless the config says otherwise."""

    first_k_dense_replace: int = 1


FAMILY = Family(
    model_type="glm4_moe_lite",
    config=Config,
    layer=latent_layer,
    mtp=True,
    rename=SHARED_EXPERTS,
    unrename=SHARED_EXPERT_AS_PUBLISHED,
    dialect="key-value-tags",
    tiny={**TINY, "rope_theta": 1e6},
)
