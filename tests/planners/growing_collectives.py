"""Which collectives of a data-parallel step grow with its batch."""

from collections import Counter

from aliquot import DataParallel
from aliquot.cluster import Cluster
from aliquot.core import CaptureError, InputError
from aliquot.cost import collective_uses, make_problem
from aliquot.sharding.micro_batches import plan_micro_batches

# A batch of eight rows, and half of it, can be split over these.
CLUSTER = Cluster.preset("4xcpu")


def growing_collectives(graph):
    """The priced collectives of a step under data parallelism that are larger than those of the
    same step on half of its batch; None if its examples depend on one another, so that it cannot be
    cut into micro-batches, or if devices do not divide its batch.
    """
    try:
        half = plan_micro_batches(graph, 2).part
        on_half, on_whole = sent(half), sent(graph)
    except (CaptureError, InputError):
        return None
    return sorted(label for label, size in on_whole.items() if size > on_half[label])


def sent(graph):
    """Bytes of the collectives of a step, by kind and label."""
    (stage,) = DataParallel().solve(make_problem(graph, CLUSTER)).stages
    found = Counter()
    for use in collective_uses(stage.picked):
        found[f"{use.kind} of {use.label}"] += use.num_bytes * use.count
    return found
