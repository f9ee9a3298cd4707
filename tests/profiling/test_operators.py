"""Single operators: their names, their programs, and which of them a step needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_products import STEP

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.cost import make_problem
from aliquot.graph import capture
from aliquot.profiling import (
    LAUNCH,
    Measurement,
    Operator,
    ProfileDatabase,
    Timing,
    compile_operator,
    measured_curves,
    operator_key,
    operators_of_plan,
    profile_operators,
    required_operators,
)

OPERATORS = [
    Operator("product", "float32", (1, 16, 32, 8)),
    Operator("product", "bfloat16", (4, 16, 32, 8)),
    Operator("traffic", "float32", (4096,)),
    *[
        Operator(kind, "float32", (1024,), axes)
        for kind in (
            "all-reduce",
            "all-gather",
            "reduce-scatter",
            "all-to-all",
            "collective-permute",
        )
        for axes in ((0,), (1,), (0, 1))
    ],
    Operator("transfer", "float32", (1 << 16,)),
    LAUNCH,
]


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_name_says_which_operator_it_is(operator):
    assert Operator.parse(str(operator)) == operator


@pytest.mark.parametrize(
    "text", ["", "0f3a" * 16, "product float32", "product float32 axb", "gather float32 8 along 0"]
)
def test_other_programs_are_no_operators(text):
    assert Operator.parse(text) is None


def test_a_transfer_goes_from_one_half_of_the_devices_to_the_other():
    part = compile_operator(OPERATORS[-2], (2, 2))
    x = jnp.arange(1 << 14, dtype=jnp.float32)
    moved = part.compiled(jax.device_put(x, part.arguments[0].sharding))
    assert part.arguments[0].shape == x.shape and (np.asarray(moved) == np.asarray(x)).all()
    assert [part.arguments[0].sharding.device_set, moved.sharding.device_set] == [
        set(jax.devices()[:2]),
        set(jax.devices()[2:4]),
    ]


@pytest.mark.parametrize("operator", [o for o in OPERATORS if o.kind != "transfer"], ids=str)
def test_each_device_runs_the_operator_and_nothing_else(operator):
    part = compile_operator(operator, (2, 2))
    text = part.compiled.as_text()
    found = {
        kind
        for kind in (
            "all-reduce",
            "all-gather",
            "reduce-scatter",
            "all-to-all",
            "collective-permute",
        )
        if f" {kind}(" in text
    }
    assert found == ({operator.kind} if operator.axes else set())
    if operator.kind == "product":
        batch, rows, columns, depth = operator.sizes
        lead = f"{batch}," if batch > 1 else ""
        assert [tuple(a.shape[1:]) for a in part.arguments] == [
            (*([batch] if batch > 1 else []), rows, depth),
            (*([batch] if batch > 1 else []), depth, columns),
        ]
        assert f"[1,{lead}{rows},{columns}]" in text


def test_only_collectives_depend_on_the_mesh():
    product, collective = OPERATORS[0], OPERATORS[3]
    assert (
        operator_key(product, (4, 2)) == operator_key(product, (8,)) != operator_key(product, (4,))
    )
    assert operator_key(collective, (4, 2)) != operator_key(collective, (2, 4))


def test_a_step_needs_the_products_of_all_its_splits():
    problem = make_problem(capture(*STEP), Cluster.preset("4xH100"))
    found = required_operators(problem, [(4,), (2, 2)])
    assert found[0] == (LAUNCH, (4,)) and len({(str(o), s) for o, s in found}) == len(found)
    products = {operator.sizes for operator, _ in found if operator.kind == "product"}
    # Rows, columns and length of the first product's sums, whole, halved and quartered.
    assert {
        (1, 128, 256, 64),
        (1, 32, 256, 64),
        (1, 128, 64, 64),
        (1, 64, 128, 64),
        (1, 64, 256, 32),
    } <= products
    collectives = {
        (operator.kind, operator.axes, shape) for operator, shape in found if operator.axes
    }
    assert {
        ("all-reduce", (0,), (4,)),
        ("all-reduce", (0,), (2, 2)),
        ("all-gather", (1,), (2, 2)),
    } <= collectives
    small = required_operators(problem, [(4,)], largest_in_host_bytes=4096)
    assert max(operator.sizes[0] for operator, _ in small if operator.axes) <= 4096


def test_what_may_save_most_comes_first():
    # So large that a quarter of a product takes less time than all of it.
    step, *arguments = STEP
    large = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(tuple(16 * size for size in a.shape), a.dtype), arguments
    )
    problem = make_problem(capture(step, *large), Cluster.preset("4xH100"))
    products = [
        operator
        for operator, _ in required_operators(problem, [(4,)])
        if operator.kind == "product"
    ]
    whole = products.index(Operator("product", "float32", (1, 2048, 4096, 1024)))
    assert all(
        products.index(Operator("product", "float32", split)) < whole
        for split in [(1, 512, 4096, 1024), (1, 2048, 1024, 1024)]
    )


@pytest.mark.parametrize(
    "method", [aq.DataParallel(), aq.Zero3Parallel(), aq.Auto()], ids=lambda m: type(m).__name__
)
def test_a_plan_needs_some_of_what_its_step_needs(method):
    cluster = Cluster.preset("4xH100")
    plan = aq.plan(*STEP, cluster=cluster, method=method)
    graph = capture(*STEP)
    of_plan = operators_of_plan(aq.planners.apply_plan(plan, graph))
    of_step = required_operators(make_problem(graph, cluster), [plan.stages[0].mesh_shape])
    products = {each for each in of_plan if each[0].kind == "product"}
    assert products and products <= set(of_step) and len(of_plan) < len(of_step)


def test_shares_merged_are_one_run(tmp_path, monkeypatch):
    """Times are made of labels, so that they are the same wherever a program runs."""
    monkeypatch.setattr(
        "aliquot.profiling._run.time_part",
        lambda part, *args, **options: Measurement(
            seconds=1e-3 * (1 + len(part.label)), label=part.label
        ),
    )
    some = [(operator, (2, 2)) for operator in OPERATORS]
    with ProfileDatabase(tmp_path / "one.sqlite") as one:
        assert profile_operators(some, one).num_missing == 0
        whole, curves = list(one.rows()), measured_curves(one)
    for k in (1, 2, 3):
        with ProfileDatabase(tmp_path / f"{k}.sqlite") as part:
            profile_operators(some, part, share=(k, 3))
    with ProfileDatabase(tmp_path / "merged.sqlite") as merged:
        taken = [merged.merge(tmp_path / f"{k}.sqlite") for k in (1, 2, 3)]
        assert list(merged.rows()) == whole and measured_curves(merged) == curves
    assert sum(taken) == len(whole) and min(taken) >= len(whole) // 3 and curves


def test_operators_are_measured_once(tmp_path):
    some = [(operator, (2, 2)) for operator in (OPERATORS[0], OPERATORS[3], LAUNCH)]
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        first = profile_operators(some, database, timing=Timing(repeats=2, warm_up=1))
        again = profile_operators(some, database, timing=Timing(repeats=2, warm_up=1))
        found = dict(database.rows())
    assert (first.num_measured, again.num_measured, again.num_known) == (3, 0, 3)
    assert {key.program for key in found} == {str(operator) for operator, _ in some}
    assert all(np.isfinite(m.seconds) and m.seconds > 0 and m.repeats >= 2 for m in found.values())
