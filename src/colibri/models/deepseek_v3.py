"""DeepSeek-V3 and R1; Kimi-K2 without groups of experts; Kimi-K2.5 and 2.6 without their eyes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.family import Family
from colibri.models.latent import TINY, YARN, LatentMoEConfig, latent_gguf, latent_layer
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Config(LatentMoEConfig):
    """Three dense layers unless the config says otherwise."""

    first_k_dense_replace: int = 3

    unused_keys: ClassVar[frozenset[str]] = frozenset(
        {
            "ignore_index",
            "media_placeholder_token_id",
            "projection_hidden_size",
            "projection_layer_norm_eps",
            "use_unified_vision_chunk",
        }
    )


FAMILY = Family(
    model_type="deepseek_v3",
    aliases=("kimi_k2", "kimi_k25"),
    config=Config,
    layer=latent_layer,
    mtp=True,
    rename=((r"^language_model\.", ""), *SHARED_EXPERTS),
    unrename=SHARED_EXPERT_AS_PUBLISHED,
    ignore=(r"vision_tower\.", r"(model\.)?mm_projector\."),
    gguf=(latent_gguf(lambda keys: keys.get("expert_gating_func") == 2),),
    dialect="tool-sections",
    tiny={**TINY, "n_group": 4, "topk_group": 2, "rope_scaling": YARN},
)
