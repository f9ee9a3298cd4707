"""Products whose partial sums their users want split: on each device's piece, and
reduce-scattered.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from runtime.planned import parallel

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.planners import ManualParallel, Zero2Parallel
from aliquot.runtime import find_collectives
from aliquot.runtime.spmd._local import Devices, scattered_product

WIDTH, HIDDEN = 64, 128


def arguments(dtype="float32", rows=64):
    random = np.random.default_rng(0)
    sizes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    state = {name: jnp.asarray(random.normal(size=size) / 8, dtype) for name, size in sizes.items()}
    moments = jax.tree.map(jnp.zeros_like, state)
    return {"params": state, "moments": moments}, jnp.asarray(
        random.normal(size=(rows, WIDTH)), dtype
    )


def step(state, rows):
    def loss(params):
        hidden = rows + jnp.tanh(rows @ params["up"]) @ params["down"]
        return jnp.mean(jnp.square(jnp.tanh(hidden)))

    value, grads = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.5 * m + g, state["moments"], grads)
    return {
        "params": jax.tree.map(lambda p, m: p - m, state["params"], moments),
        "moments": moments,
    }, value


def bytes_by_kind(found):
    total = {}
    for c in found:
        total[c.kind] = total.get(c.kind, 0) + c.num_bytes
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_gradients_of_split_states_are_scattered(dtype):
    """Narrow ones travel as float32, as all-reduces of theirs do."""
    with jax.enable_x64(dtype == "float64"):
        args = arguments(dtype)
        planned = parallel(step, *args, method=Zero2Parallel())
        found = bytes_by_kind(find_collectives(planned.lower().compile().as_text(), ("x",), (8,)))
        itemsize = max(4, jnp.dtype(dtype).itemsize)
        planned_bytes = bytes_by_kind(planned.plan.prediction.collectives)
        assert (
            found["reduce-scatter"]
            == planned_bytes["reduce-scatter"]
            == 2 * WIDTH * HIDDEN * itemsize // 8
        )
        # The loss, and no gradient.
        assert found["all-reduce"] == planned_bytes["all-reduce"] <= 8
        check = planned.check(*args)
        assert check.largest < {"float32": 1e-5, "float64": 1e-12}.get(dtype, 0.02), str(check)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_groups_of_devices_scatter_their_own(num_micro_batches):
    """Rows over one axis, features over the other: each group of devices sums along the other
    alone.
    """
    args = arguments()
    specs = {"rows": ("x", "y"), "*up": (None, "y"), "*down": ("y", None)}
    method = ManualParallel(specs=specs, mesh_shape=(4, 2))
    planned = parallel(step, *args, method=method, num_micro_batches=num_micro_batches)
    text = planned.lower().compile().as_text()
    found = [
        c
        for c in find_collectives(text, ("x", "y"), (4, 2))
        if c.kind == "reduce-scatter" and c.axes == ("y",)
    ]
    inside = [c for c in found if c.in_loop is (num_micro_batches > 1)]
    assert inside and "reduce-scatter" in {u.kind for u in planned.plan.prediction.collectives}
    check = planned.check(*args)
    assert check.largest < 1e-5, str(check)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plans_for_gpus_run_on_other_devices(dtype):
    """Products whose sums other axes finish are scattered as on GPUs, whose compiler merges what
    follows two of them.
    """

    def step(state, batch):
        hidden = jnp.tanh(batch["a"] @ state["up"] + batch["b"] @ state["gate"])
        return {**state, "last": 0.5 * state["last"] + hidden}, jnp.mean(hidden**2)

    random = np.random.default_rng(0)
    made = {name: jnp.asarray(random.normal(size=(256, 64)) / 16, dtype) for name in ("up", "gate")}
    state = {**made, "last": jnp.zeros((64, 64), dtype)}
    batch = {name: jnp.asarray(random.normal(size=(64, 256)), dtype) for name in "ab"}
    specs = {
        "state.up": (("x", "y"), None),
        "state.gate": (("x", "y"), None),
        "state.last": ("y", None),
    }
    method = ManualParallel(specs=specs | {"batch.*": (None, ("x", "y"))}, mesh_shape=(4, 2))
    plan = aq.plan(step, state, batch, cluster=Cluster.preset("8xH100"), method=method)
    planned = aq.parallelize(step, plan, devices=jax.devices()[:8])
    planned.prepare(state, batch)
    found = find_collectives(planned.lower().compile().as_text(), ("x", "y"), (4, 2))
    assert [c.axes for c in found if c.kind == "reduce-scatter"] == [("y",), ("y",)]
    check = planned.check(state, batch)
    assert check.largest < {"float32": 1e-5}.get(dtype, 0.02), str(check)


CASES = {
    "sums over one axis": ((None, "x"), ("x", None), ("x", None), ["reduce-scatter"]),
    "sums over two axes": (
        (None, ("x", "y")),
        (("x", "y"), None),
        (("x", "y"), None),
        ["reduce-scatter"],
    ),
    "behind what is split": (("y", "x"), ("x", None), (("y", "x"), None), ["reduce-scatter"]),
    "along two dims": ((None, ("x", "y")), (("x", "y"), None), ("x", "y"), ["reduce-scatter"] * 2),
    "some are finished": (
        (None, ("x", "y")),
        (("x", "y"), None),
        ("x", None),
        ["all-reduce", "reduce-scatter"],
    ),
    "sums over two axes are finished": (
        (None, ("x", "y", "z")),
        (("x", "y", "z"), None),
        ("x", None),
        ["all-reduce", "reduce-scatter"],
    ),
    "none is scattered": ((None, "x"), ("x", None), (None, None), None),
    "operands split differently": ((None, "x"), ("y", None), ("x", None), None),
    "in front of what is split": (("y", "x"), ("x", None), (("x", "y"), None), None),
}


@pytest.mark.parametrize("wide_sums", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_products_on_pieces_sum_to_the_whole_product(case, wide_sums, mesh):
    *splits, kinds = CASES[case]
    left, right, wanted = (P(*dims) for dims in splits)
    names, sizes = (
        ("xyz", (2, 2, 2)) if case == "sums over two axes are finished" else ("xy", (4, 2))
    )
    devices = mesh(*sizes)
    random = np.random.default_rng(1)
    a, b = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((16, 32), (32, 24)))
    (eqn,) = jax.make_jaxpr(lambda a, b: a @ b)(a, b).eqns

    def bind(eqn, operands):
        return [eqn.primitive.bind(*operands, **eqn.params)]

    def run(a, b):
        return scattered_product(
            eqn,
            (a, b),
            bind,
            Devices(devices),
            [left, right],
            lambda shape: wanted,
            wide_sums=wide_sums,
        )

    if kinds is None:
        assert run(a, b) is None
        return
    program = jax.jit(lambda a, b: run(a, b)[0]).lower(a, b).compile()
    found = find_collectives(program.as_text(), tuple(names), sizes)
    assert sorted(c.kind for c in found for _ in range(int(c.count))) == kinds
    np.testing.assert_allclose(jax.jit(run)(a, b)[0], a @ b, rtol=1e-5, atol=1e-5)
