"""Numbers of micro-batches that a pipeline may have, and chains interpolated for numbers between
those that were priced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..cluster import Cluster
from ..core import divisors
from ..cost import UNIT_FIGURES, Chain
from ..graph import Graph

MOST_MICRO_BATCHES = 1024
MANY_DEVICES = 128


def batch_size(graph: Graph) -> int:
    """Size of the batch, which numbers of micro-batches must divide; 1 for a step without one."""
    return math.gcd(*graph.batch_sizes) or 1


def program_counts(graph: Graph, num_devices: int) -> list[int]:
    """Numbers of micro-batches that a program may have, in rising order: the divisors of the batch
    that leave each device as many rows, then those that leave fewer rows than devices, each at
    least twice the one before.
    A batch of 96 on 8 devices may have 1, 2, 3, 4, 6, 12, 24, 48 or 96 of them.
    """
    size = batch_size(graph)
    every = divisors(size, most=MOST_MICRO_BATCHES)
    counts = [n for n in every if size // n % num_devices == 0] or [1]
    for count in every:
        if count >= 2 * counts[-1]:
            counts.append(count)
    return counts


def counts_to_try(graph: Graph, cluster: Cluster) -> list[list[int]]:
    """Groups of numbers of micro-batches; a group is tried if nothing fits with the one before it.

    The first group has the divisors of the batch that leave each micro-batch a sample for each
    device of a host; on many devices, where searches take long, only some, each at least twice the
    one before. The second group has the two largest divisors above these: if memory is short, only
    smaller micro-batches may fit.
    """
    size = batch_size(graph)
    every = divisors(size, most=MOST_MICRO_BATCHES)
    usual = [n for n in every if n * cluster.devices_per_host <= size] or [1]
    # With a single micro-batch, only one stage is busy at a time.
    first = [n for n in usual if n > 1] or usual
    if cluster.num_devices > MANY_DEVICES:
        # The first number, the last, and those between that are at least twice the one kept before
        # them and at most half of the last.
        kept = list(first[:1])
        for count in first[1:-1]:
            if count >= 2 * kept[-1] and 2 * count <= first[-1]:
                kept.append(count)
        first = kept + list(first[1:][-1:])
    return [first, [n for n in every if n > usual[-1]][-2:]]


def drawn_between(chains: Sequence[Chain], priced: Mapping[int, Chain]) -> list[Chain]:
    """Chains of a step for several numbers of micro-batches: the priced chain of a number if there
    is one, otherwise the given chain with figures interpolated between the nearest priced ones.

    Args:
        chains: one for each number; they keep their figures for options that were not priced on
            both sides.
        priced: chains by number of micro-batches, the fewest and the most included.
    """
    drawn = []
    for chain in chains:
        count = chain.num_micro_batches
        if count in priced:
            drawn.append(priced[count])
            continue
        # Interpolated linearly in the size of a micro-batch: under one split, seconds and bytes
        # grow about so. The fastest of several splits lies near the line, and mostly above it.
        coarse = priced[max(other for other in priced if other < count)]
        fine = priced[min(other for other in priced if other > count)]
        sizes = [1 / c.num_micro_batches for c in (fine, chain, coarse)]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0])
        # For each option, its number in the priced chains; -1 if they lack it.
        numbers = []
        for other in (fine, coarse):
            place = {(o.submesh, o.mesh_shape, o.recompute): k for k, o in enumerate(other.options)}
            layouts = [(o.submesh, o.mesh_shape, o.recompute) for o in chain.options]
            numbers.append(np.array([place.get(layout, -1) for layout in layouts]))
        of_fine, of_coarse = numbers
        known = (of_fine >= 0) & (of_coarse >= 0) & np.isfinite(chain.forward_s)
        between = {}
        # Number -1 reads the last column, which `known` masks out.
        for name in UNIT_FIGURES:
            near, far = getattr(fine, name)[:, of_fine], getattr(coarse, name)[:, of_coarse]
            known_both = known & np.isfinite(near) & np.isfinite(far)
            with np.errstate(invalid="ignore"):
                between[name] = np.where(
                    known_both, (1 - share) * near + share * far, getattr(chain, name)
                )
        # Both are interpolated separately, so rounding could make the part exceed the whole.
        between["weight_gradient_s"] = np.minimum(
            between["weight_gradient_s"], between["backward_s"]
        )
        drawn.append(replace(chain, **between))
    return drawn
