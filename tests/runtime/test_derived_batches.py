"""Batches that a step reshapes, strides and gathers, in micro-batches: what is planned can run, and
gives the plain step's numbers.

Some of these steps write down numbers of examples, so that they run on a micro-batch and not on a
device's share of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.core import CaptureError, InputError

_DEVICES, _ROWS, _LENGTH, _WIDTH = 4, 16, 3, 4
_SHAPE = (_LENGTH, _WIDTH)
_FORMS = {
    "two halves": lambda x: x.reshape(2, -1, *_SHAPE).sum(0),
    "pairs": lambda x: x.reshape(-1, 2, *_SHAPE),
    "pairs side by side": lambda x: x.reshape(-1, 2 * _LENGTH, _WIDTH),
    "four halves": lambda x: x.reshape(4, 2, -1, *_SHAPE),
    "written down": lambda x: x.reshape(_ROWS // 2, 2, *_SHAPE).transpose(0, 2, 1, 3),
    "in a row": lambda x: x.reshape(-1, _WIDTH),
    "length first": lambda x: x.transpose(1, 0, 2),
    "every second": lambda x: x[::2],
    "both seconds": lambda x: jnp.stack([x[::2], x[1::2]], 1),
    "every fourth": lambda x: x[::4],
    "in four": lambda x: sum(jnp.split(x, 4)),
    "last": lambda x: x[-1:],
    "some": lambda x: x[np.array([3, 1, 0])],
    "first by number": lambda x: jax.lax.dynamic_slice_in_dim(x, 2, _ROWS // 2),
    "padded": lambda x: jnp.pad(x, ((0, x.shape[0]), (1, 1), (0, 0))),
}
_METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(mesh_shape=(_DEVICES,)),
    "auto": aq.WholeProgram(max_axes=1),
    "pipeline": aq.PipeshardParallel(num_stages=2, schedule="1f1b"),
}
_QUICK = {
    "dp": set(_FORMS),
    "shard": {"two halves", "written down", "length first", "every fourth", "in four", "padded"},
    "pipeline": {"four halves", "both seconds"},
}
# Stages, searched splits and a split of the batch with each form; what these split of the state, or
# whether a search chose it, with a third of the forms each.
_CASES = [
    (form, method)
    for k, form in enumerate(_FORMS)
    for method in ("dp", "shard", "pipeline", ("zero2", "zero3", "auto")[k % 3])
]
# What no part of a batch can follow.
_REFUSED = {("written down", method) for method in _METHODS}


def _step(form):
    def loss(params, x):
        x = form(x)
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def train_step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch["x"])
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], {"loss": value}

    return train_step


@pytest.mark.parametrize(
    ("form", "method"),
    [
        pytest.param(form, method, marks=() if form in _QUICK.get(method, ()) else pytest.mark.slow)
        for form, method in _CASES
    ],
)
def test_what_is_planned_runs(form, method, x64, tmp_path):
    step, random = _step(_FORMS[form]), np.random.default_rng(0)
    state = [random.standard_normal((_WIDTH, _WIDTH)) for _ in range(2)]
    batch = {"x": random.standard_normal((_ROWS, *_SHAPE))}
    wanted = jax.jit(step)(state, batch)
    planned = 0
    for count in (2, 4):
        try:
            plan = aq.plan(
                step,
                state,
                batch,
                cluster=aq.Cluster.preset(f"{_DEVICES}xcpu"),
                method=_METHODS[method],
                num_micro_batches=count,
            )
        except (CaptureError, InputError) as error:
            assert "micro-batch" in str(error) or "batch" in str(error), error
            continue
        planned += 1
        plan.save(tmp_path / "plan.json")
        parallel = aq.parallelize(
            step, aq.Plan.load(tmp_path / "plan.json"), devices=jax.devices()[:_DEVICES]
        )
        found = parallel(jax.tree.map(np.array, state), batch)
        for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-9, atol=1e-12)
    assert (planned == 0) == ((form, method) in _REFUSED), planned


@pytest.mark.parametrize("method", ["dp", "zero3"])
def test_gradients_wait_for_the_last_micro_batch_where_devices_divide_its_parts(method):
    shapes = [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.float32)] * 2
    batch = {"x": jax.ShapeDtypeStruct((_ROWS, *_SHAPE), jnp.float32)}

    def planned(form, count=2):
        return aq.plan(
            _step(_FORMS[form]),
            shapes,
            batch,
            cluster=aq.Cluster.preset(f"{_DEVICES}xcpu"),
            method=_METHODS[method],
            num_micro_batches=count,
        )

    assert planned("in a row").stages[0].data_axes
    # Each of the four parts has two rows of a micro-batch, for four devices.
    with pytest.raises(
        aq.InputError, match="makes 2 rows or groups of it.* Use 1 micro-batch, 2 devices, a step"
    ):
        planned("in four")
    assert any(planned("in four", 1).stages[0].shardings["batch.x"])


def test_independent_micro_batches_sum_their_gradients_each():
    shapes = [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.float32)]
    plan = aq.plan(
        _step(lambda x: x / jnp.sqrt(1 + jnp.mean(x**2, axis=0))),
        shapes,
        {"x": jax.ShapeDtypeStruct((_ROWS, *_SHAPE), jnp.float32)},
        cluster=aq.Cluster.preset(f"{_DEVICES}xcpu"),
        method=aq.DataParallel(),
        num_micro_batches=2,
        micro_batch_semantics="independent",
    )
    assert not plan.stages[0].data_axes and not plan.sums_gradients_once
