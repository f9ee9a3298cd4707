"""How far a scheduler that hides latency moves work that nothing waits for.

Such a scheduler places work beside the collectives of other layers: products whose results only the
update needs behind the gathers of earlier layers, gathers of parameters ahead of their products.
Where products take long compared with gathers, little work fills the time of a gather, so that work
moves few layers; where gathers take longer, it moves many. `compute_per_gather` is this ratio, and
deferred products move by at most `LAYERS_MOVED` layers over it.

Both figures were fitted to programs that XLA compiled for H100, in which Llama-7B at 2,048 tokens a
device has a ratio of 0.84.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...graph import Phase
from .._collectives import collective_line

if TYPE_CHECKING:
    from .._priced import Priced

LAYERS_MOVED = 4.0
_SHARE = 0.56


def compute_per_gather(priced: Priced) -> float:
    """Time of products for gradients, all devices sharing them, over the time in which all devices
    gather the parameters of these gradients; infinite where nothing is gathered.
    """
    mesh, target = priced.mesh, priced.target
    products_s = num_bytes = 0.0
    for node, edge in {
        e.source: e for e in priced.graph.edges if e.kind == "result" and e.gradient
    }.items():
        num_bytes += edge.num_bytes * edge.count
        for work in priced.work[node]:
            if work.flops and work.phase is Phase.BACKWARD:
                speed = target.product_flops_per_s(mesh.cluster.device, work.dtype)
                products_s += work.flops / speed
    _, per_byte = collective_line("all-gather", range(len(mesh.shape)), mesh, target)
    gathers_s = per_byte * num_bytes
    # Both are shared by all devices: each multiplies, and sends, its own part.
    return _SHARE * products_s / gathers_s if gathers_s else math.inf
