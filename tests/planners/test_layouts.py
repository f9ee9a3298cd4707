"""A program whose layout is known from another mesh is the one that is laid out anew."""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import MeshUse, make_problem, price
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp._layout import Layouts
from aliquot.planners.intra.ilp._program import build_program


@pytest.fixture(scope="module")
def problem():
    workload = zoo.build("gpt-125m", 64, overrides={"num_layers": 2})
    graph = aq.capture(workload.train_step, workload.state, workload.batch)
    return make_problem(graph, Cluster.preset("2x4xV100-16GB"))


def priced_on(problem, shape):
    mesh = LogicalMesh(shape=shape, cluster=problem.cluster)
    return price(problem, MeshUse(mesh=mesh, data_axes=frozenset({0})))


def test_a_cached_layout_takes_other_prices(problem):
    layouts = Layouts()
    build_program(priced := priced_on(problem, (4, 2)), everything(priced), layouts)
    priced = priced_on(problem, (2, 4))
    assert layouts.of(priced, everything(priced)) is layouts.of(
        priced_on(problem, (4, 2)), everything(priced)
    )
    found, _ = build_program(priced, everything(priced), layouts)
    for a, b in zip(
        found.arrays(), build_program(priced, everything(priced))[0].arrays(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_other_choices_need_another_layout(problem):
    layouts, priced = Layouts(), priced_on(problem, (4, 2))
    all_choices = everything(priced)
    fewer = [mask.copy() for mask in all_choices]
    next(mask for mask in fewer if len(mask) > 1)[-1] = False
    assert layouts.of(priced, fewer) is not layouts.of(priced, all_choices)
    assert (
        build_program(priced, fewer, layouts)[1].num_integer
        == build_program(priced, all_choices)[1].num_integer - 1
    )


def test_a_cached_layout_keeps_no_rows_of_earlier_problems(problem):
    layouts, priced = Layouts(), priced_on(problem, (4, 2))
    program, _ = build_program(priced, everything(priced), layouts)
    num_rows = len(program.lower)
    program.add_rows(3, 0.0, 1.0)
    assert len(build_program(priced, everything(priced), layouts)[0].lower) == num_rows
