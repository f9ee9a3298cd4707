"""Numbers of micro-batches that a pipeline may have, and chains for those between two that were
priced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..cost import UNIT_FIGURES, Chain, StageOption
from ..graph import Graph, Role

MOST_MICRO_BATCHES = 1024
MANY_DEVICES = 128


def batch_size(graph: Graph) -> int:
    """Size of the batch, of which numbers of micro-batches are divisors; 1 if the step has none."""
    sizes = [
        graph.values[i.value].shape[0]
        for i in graph.inputs
        if i.role is Role.BATCH and graph.values[i.value].shape
    ]
    return math.gcd(*sizes) or 1


def counts_to_try(graph: Graph, cluster: Cluster) -> list[list[int]]:
    """Groups of numbers of micro-batches; each group is tried if nothing fits with the one before.

    The first has all divisors of the batch that leave a micro-batch a sample for each device of a
    host; on many devices, as searches take long there, only some that are at least twice the one
    before. If memory is short, only smaller micro-batches may fit.
    """
    size = batch_size(graph)
    divisors = [n for n in range(1, min(size, MOST_MICRO_BATCHES) + 1) if size % n == 0]
    usual = [n for n in divisors if n * cluster.devices_per_host <= size] or [1]
    # A single micro-batch keeps one stage busy at a time.
    first = [n for n in usual if n > 1] or usual
    if cluster.num_devices > MANY_DEVICES:
        first = _at_least_doubling(first)
    return [first, [n for n in divisors if n > usual[-1]][-2:]]


def _at_least_doubling(counts: Sequence[int]) -> list[int]:
    """The first, the last, and those between that are at least twice the one before and at most
    half of the last.
    """
    kept = list(counts[:1])
    for count in counts[1:-1]:
        if count >= 2 * kept[-1] and 2 * count <= counts[-1]:
            kept.append(count)
    return kept + list(counts[1:][-1:])


def drawn_between(chains: Sequence[Chain], priced: Mapping[int, Chain]) -> list[Chain]:
    """Chains of a step for several numbers of micro-batches: those that were priced, and for the
    other numbers the given ones with figures between the nearest that were.

    Args:
        chains: one for each number; figures of options that were not priced on both sides stay.
        priced: by number of micro-batches, the fewest and the most included.
    """
    drawn = []
    for chain in chains:
        count = chain.num_micro_batches
        if count in priced:
            drawn.append(priced[count])
            continue
        fewer = max(other for other in priced if other < count)
        more = min(other for other in priced if other > count)
        drawn.append(_chain_between(chain, priced[fewer], priced[more]))
    return drawn


def _chain_between(chain: Chain, coarse: Chain, fine: Chain) -> Chain:
    """A chain with figures between those of two others, by the size of its micro-batches.

    Seconds and bytes of one way to split grow about linearly with the size of a micro-batch. The
    fastest way of several lies near the line between two of its points, and mostly above it.

    Args:
        chain: for its number of micro-batches; figures of options that another lacks stay.
        coarse: priced at fewer and larger micro-batches.
        fine: priced at more and smaller ones.
    """
    sizes = [1 / c.num_micro_batches for c in (fine, chain, coarse)]
    share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0])
    of_fine, of_coarse = (_columns(other, chain.options) for other in (fine, coarse))
    known = (of_fine >= 0) & (of_coarse >= 0) & np.isfinite(chain.forward_s)
    between = {}
    # An option that another chain lacks takes the last column there and is masked out.
    for name in UNIT_FIGURES:
        near, far = getattr(fine, name)[:, of_fine], getattr(coarse, name)[:, of_coarse]
        known_both = known & np.isfinite(near) & np.isfinite(far)
        with np.errstate(invalid="ignore"):
            between[name] = np.where(
                known_both, (1 - share) * near + share * far, getattr(chain, name)
            )
    # Both are interpolated by themselves, and rounding could put the part above the whole.
    between["weight_gradient_s"] = np.minimum(between["weight_gradient_s"], between["backward_s"])
    return replace(chain, **between)


def _columns(chain: Chain, options: Sequence[StageOption]) -> NDArray[np.int64]:
    """For each option its number in a chain, -1 if the chain lacks it."""
    place = {(o.submesh, o.mesh_shape, o.recompute): k for k, o in enumerate(chain.options)}
    return np.array([place.get((o.submesh, o.mesh_shape, o.recompute), -1) for o in options])
