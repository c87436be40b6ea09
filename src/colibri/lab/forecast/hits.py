"""Which share of a token's experts will be in memory: from heat where there is any, else typical.

The typical curve is that of the bundled model, 4 of 32 experts a layer, over texts of six kinds,
under the default policy (`coli sim`, second halves). Models of more and smaller experts may do
better or worse; a run leaves heat, and then the forecast is the model's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TYPICAL = (
    *((0.0, 0.0), (0.057, 0.186), (0.125, 0.389), (0.25, 0.598)),
    *((0.5, 0.846), (0.75, 0.968), (1.0, 1.0)),
)
_LEAST_USES = 2000.0  # of experts, below which heat tells little


class Hits(NamedTuple):
    """A hit rate and where it comes from: `heat`, `typical`, `given`, or `all` where all fit."""

    rate: float
    source: str


def expected_hits(
    resident: float, heat: NDArray[np.float64] | None, given: float | None = None
) -> Hits:
    """Hits where a share `resident` of the experts is in memory.

    Args:
        resident: 0 to 1.
        heat: uses `[L, E]` of earlier runs; the busiest are then taken to be in memory.
        given: what somebody knows better.
    """
    if given is not None:
        return Hits(given, "given")
    if resident >= 1:
        return Hits(1.0, "all")
    if heat is not None and heat.sum() >= _LEAST_USES:
        busiest = np.sort(heat, axis=None)[::-1]
        return Hits(float(busiest[: int(resident * heat.size)].sum() / heat.sum()), "heat")
    shares, rates = zip(*TYPICAL, strict=True)
    return Hits(float(np.interp(resident, shares, rates)), "typical")
