"""Checks at run time raise under plans as they do without: for any example, in any micro-batch, on
any device.
"""

from __future__ import annotations

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.steps import STEPS
from runtime.planned import loop_results, parallel

import aliquot as aq
from aliquot.core import CaptureError
from aliquot.graph import capture

ROWS = 32


def checked(params, x):
    def loss(params):
        def one(x):
            return jnp.tanh(eqx.error_if(x, x.max() > 1.0, "too large") @ params)

        return jnp.mean(jax.vmap(one)(x) ** 2)

    return params - jax.grad(loss)(params)


def arguments():
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=(4, 4)) / 2), jnp.asarray(
        random.uniform(-1, 1, (ROWS, 4))
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("method", [aq.DataParallel(), aq.ShardParallel()], ids=["dp", "shard"])
def test_a_check_that_passes(method, num_micro_batches):
    planned = parallel(checked, *arguments(), method=method, num_micro_batches=num_micro_batches)
    assert planned.check(*arguments()).largest < 1e-5


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_check_that_fails(num_micro_batches):
    """On one device: what raises on one of several leaves the others waiting for it, and XLA ends
    the process.
    """
    params, x = arguments()
    graph = capture(checked, params, x)
    with pytest.raises(Exception, match="too large"):
        jax.block_until_ready(
            loop_results(
                graph, [params, x.at[ROWS - 1, 2].set(2.0)], num_micro_batches=num_micro_batches
            )
        )


@pytest.mark.parametrize("method", [aq.DataParallel(), aq.ShardParallel()], ids=["dp", "shard"])
@pytest.mark.parametrize(
    "name",
    [
        "equinox_checked",
        pytest.param("equinox_checkpointed_loop", marks=pytest.mark.slow),
        "equinox_bounded_loop",
        "functions_with_rules_of_their_own",
        "sparse_weights",
    ],
)
def test_primitives_of_libraries_in_micro_batches(name, method):
    step = STEPS[name]()
    args = (step.args[0], {key: jnp.tile(array, (4, 1)) for key, array in step.args[1].items()})
    planned = parallel(step.fn, *args, method=method, num_micro_batches=2)
    check = planned.check(*args)
    assert check.largest < 5e-5, str(check)


@pytest.mark.parametrize(
    "method",
    [aq.DataParallel(), pytest.param(aq.ShardParallel(), marks=pytest.mark.slow)],
    ids=["dp", "shard"],
)
def test_loops_that_end_when_all_examples_are_done(method):
    """Under "independent" semantics each micro-batch ends when its own are; examples that are done
    keep what they have.
    """

    def step(params, x):
        def one(params, x):
            def turn(carry):
                number, y = carry
                return number + 1, 0.5 * y + 0.1 * jnp.tanh(y @ params)

            init = (0, x)
            return eqxi.while_loop(
                lambda c: jnp.sum(c[1] ** 2) > 0.1, turn, init, max_steps=16, kind="checkpointed"
            )[1]

        grads = jax.grad(lambda params: jnp.mean(jax.vmap(lambda x: one(params, x))(x) ** 2))(
            params
        )
        return params - 9.0 * grads

    params, x = arguments()
    planned = parallel(step, params, x, method=method, num_micro_batches=2, semantics="independent")
    check = planned.check(params, x)
    assert check.largest < 1e-5, str(check)
    with pytest.raises(CaptureError, match="ends when the batch says so"):
        parallel(step, params, x, method=method, num_micro_batches=2)
