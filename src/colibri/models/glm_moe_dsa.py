"""GLM-5 to 5.2: latent attention to selected keys; some layers follow the indexer of one before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.family import Family
from colibri.models.latent import TINY, SparseLatentMoEConfig, latent_layer
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Config(SparseLatentMoEConfig):
    """The indexer, too, rotates neighbours."""

    first_k_dense_replace: int = 3
    indexer_rope_interleave: bool = True

    shares_indexers: ClassVar[bool] = True


FAMILY = Family(
    model_type="glm_moe_dsa",
    config=Config,
    layer=latent_layer,
    mtp=True,
    rename=SHARED_EXPERTS,
    unrename=SHARED_EXPERT_AS_PUBLISHED,
    dialect="key-value-tags",
    tiny={
        **TINY,
        "index_topk": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    },
)
