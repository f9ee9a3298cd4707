"""Time of fused attention, which is no product: it reaches a smaller share of the peak, and less
where few heads and examples are left to a device, or few scores to a query.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..cluster import Attention
from ..graph import Scores

Floats = NDArray[np.float64]


def attention_seconds(
    scores: Scores, flops: Floats, parts: Floats, kernel: Attention, peak_flops_per_s: float
) -> Floats:
    """Seconds of the arithmetic of fused attention on one device.

    Args:
        flops: on one device, under each choice.
        parts: number of parts into which the choice cuts the work.
        peak_flops_per_s: of the device, in the dtype of queries and keys.
    """
    per_flop = kernel.seconds_per_flop(peak_flops_per_s, is_backward=scores.is_backward)
    # Few queries leave processors idle: half of the share is reached with `kernel.rows` of them.
    idle = 1 + kernel.rows * parts / scores.rows
    in_vain = 1 + kernel.keys / scores.keys
    return np.asarray(flops * per_flop * idle * in_vain, np.float64)
