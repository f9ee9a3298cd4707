"""Where memory is short, relaxations mix choices: rounding them finds solutions that fit, to which
others can be compared.
"""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import make_problem, price
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search

_CLUSTER = Cluster.preset("2x4xV100-16GB")
_UNLIMITED = 1e15


@pytest.fixture(scope="module")
def priced():
    work = zoo.build(zoo.configure("gpt-125m", num_layers=2), 8, scan=True)
    graph = aq.capture(work.train_step, work.state, work.batch)
    return price(make_problem(graph, _CLUSTER), LogicalMesh(shape=(8,), cluster=_CLUSTER))


def test_rounding_to_least_memory_fits_when_majority_does_not(priced):
    allowed = everything(priced)
    free = Search(priced, allowed, limit_bytes=_UNLIMITED)
    free.bound()
    most = free.picked.memory.peak_bytes
    least = free.least_memory().memory.peak_bytes
    missed = fitted = 0
    for limit in np.linspace(least, most, 8)[1:-1]:
        search = Search(priced, allowed, limit_bytes=limit)
        bound = search.bound()
        found = search.incumbent()
        if found is not None:
            assert found.peak_bytes <= limit * (1 + 1e-9)
            assert bound * (1 - 1e-9) <= found.step_time_s <= 1.05 * bound
        if search.picked.memory.peak_bytes > limit:
            missed += 1
            fitted += found is not None
    assert missed >= 3
    assert fitted >= missed / 2
