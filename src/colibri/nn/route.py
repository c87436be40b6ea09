"""Routers: what their logits become, how experts are chosen, how they are weighed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.errors import CheckpointError
from colibri.formats import Floats
from colibri.kernels.api import Norm, Router, Scoring
from colibri.nn.parameter import Parameter, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Scores p of all experts, the choice among `p + bias`, weights from the chosen p.

    A softmax over the logits of the chosen experts alone is the softmax over all, normalised.

    Attributes:
        normalize: whether the chosen weights are divided by their sum plus `epsilon`.
        scoring: what the logits become.
        linear_bias: whether the router's matrix has a bias.
        choice_bias: whether a bias takes part in the choice, and in nothing else.
        num_groups: experts are chosen inside the best `num_groups_used` of so many groups.
        group_top: a group is as good as the sum of so many of its best.
        factor: multiplies the weights.
        learned_factor: whether a learned number, `global_scale`, does so too.
        num_shared: shared experts that have rows in the router's matrix, behind the others', and
            are weighed like chosen ones.
        vocab_size: where the experts of each token are given by a table of so many tokens (hash
            layers), and only their weights depend on its state.
    """

    normalize: bool
    scoring: Scoring = "softmax"
    linear_bias: bool = False
    choice_bias: bool = False
    num_groups: int = 1
    num_groups_used: int = 1
    group_top: int = 2
    epsilon: float = 0.0
    factor: float = 1.0
    learned_factor: bool = False
    num_shared: int = 0
    vocab_size: int | None = None

    def parameters(
        self, prefix: str, num_experts: int, hidden_size: int, num_experts_per_tok: int
    ) -> list[Parameter]:
        """Tensors under `prefix`, which ends with a dot."""
        rows = num_experts + self.num_shared
        found = [Parameter(f"{prefix}weight", (rows, hidden_size), "router")]
        if self.linear_bias:
            found.append(Parameter(f"{prefix}bias", (rows,), "bias"))
        if self.learned_factor:
            found.append(Parameter(f"{prefix}global_scale", (1,), "norm"))
        if self.choice_bias:
            found.append(Parameter(f"{prefix}e_score_correction_bias", (num_experts,), "bias"))
        if self.vocab_size is not None:
            shape = (self.vocab_size, num_experts_per_tok)
            found.append(Parameter(f"{prefix}tid2eid", shape, "ids"))
        return found

    def bind(
        self, weights: Weights, prefix: str, norm: Norm | None, num_experts_per_tok: int
    ) -> Router:
        """The kernels' view of it; `norm` is of its input, where that is normed."""
        bias = f"{prefix}e_score_correction_bias"
        scale = float(weights.vector(f"{prefix}global_scale")[0]) if self.learned_factor else 1.0
        return Router(
            norm,
            weights.matrix(f"{prefix}weight", f"{prefix}bias" if self.linear_bias else None),
            num_experts_per_tok,
            self.normalize,
            scoring=self.scoring,
            bias=weights.vector(bias) if self.choice_bias else None,
            num_groups=self.num_groups,
            num_groups_used=self.num_groups_used,
            group_top=self.group_top,
            epsilon=self.epsilon,
            factor=self.factor * scale,
            num_shared=self.num_shared,
        )

    def bind_table(self, weights: Weights, prefix: str, num_experts: int) -> Floats | None:
        """`[V, A]` the experts of each token, whole numbers; None where the router chooses.

        Raises:
            CheckpointError: a token has an expert twice, or one that there is not.
        """
        if self.vocab_size is None:
            return None
        table = weights.vector(f"{prefix}tid2eid").reshape(self.vocab_size, -1)
        ordered = np.sort(table, axis=1)
        good = (np.diff(ordered, axis=1) > 0).all(axis=1)
        good &= (ordered[:, 0] >= 0) & (ordered[:, -1] < num_experts)
        if not good.all():
            token = int(np.flatnonzero(~good)[0])
            raise CheckpointError(
                f"tensor {prefix}tid2eid: token {token} has experts {table[token].tolist()}, "
                f"wanted different ones below {num_experts}; fetch the checkpoint again"
            )
        return table
