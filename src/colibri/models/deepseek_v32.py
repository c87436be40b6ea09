"""DeepSeek-V3.2: DeepSeek-V3 whose layers attend to what an indexer of their own selects."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.family import Family
from colibri.models.latent import TINY, YARN, SparseLatentMoEConfig, latent_layer
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Config(SparseLatentMoEConfig):
    """Three dense layers unless the config says otherwise; every layer has an indexer."""

    first_k_dense_replace: int = 3


FAMILY = Family(
    model_type="deepseek_v32",
    config=Config,
    layer=latent_layer,
    mtp=True,
    rename=SHARED_EXPERTS,
    unrename=SHARED_EXPERT_AS_PUBLISHED,
    dialect="dsml",
    tiny={
        **TINY,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": YARN,
        "index_topk": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
    },
)
