"""Several steps in one call, a loop over batches: methods split the batch of each step, and
refusals name its rows and not the number of steps.
"""

import jax
import pytest
from planners.small_steps import array, mlp

import aliquot as aq
from aliquot.core import InputError
from aliquot.cost import make_problem


def several_steps(count, rows):
    """`count` steps in one call, each with a batch of its own."""
    step, state, batch = mlp((64, 128, 64), rows)
    stacked = jax.tree.map(lambda x: array(count, *x.shape), batch)
    return lambda state, batches: jax.lax.scan(step, state, batches), state, stacked


@pytest.mark.parametrize("count", [1, 3])
def test_steps_in_one_call_split_the_batch_of_each(count):
    for method in (aq.DataParallel(), aq.Zero3Parallel(), aq.Megatron(data=8)):
        plan = aq.plan(
            *several_steps(count, 64), cluster=aq.Cluster.preset("8xH100"), method=method
        )
        (axis,) = plan.stages[0].axis_names
        assert plan.stages[0].shardings["batches.x"] == ((), (axis,), ())


@pytest.mark.parametrize("count", [1, 4])
def test_refusals_name_the_rows_of_each_batch_and_not_the_number_of_steps(count):
    with pytest.raises(InputError) as refusal:
        aq.plan(
            *several_steps(count, 12),
            cluster=aq.Cluster.preset("8xH100"),
            method=aq.DataParallel(),
        )
    assert str(refusal.value) == (
        f"A batch of 12 (batches.x has 12 rows in dim 1, as a loop runs over the {count} before it)"
        " cannot be split over 8 devices, and this method splits nothing else. Use a global batch"
        " that is a multiple of 8, such as 8 or 16, fewer devices, or method shard or auto."
    )


def test_a_batch_of_one_row_has_no_other_batch_dim():
    step, state, batch = mlp((64, 128, 64), 1)
    problem = make_problem(aq.capture(step, state, batch), aq.Cluster.preset("8xH100"))
    assert not any(problem.nodes.batch_factors)
    with pytest.raises(InputError, match=r"A batch of 1 \(batch.x has 1 row\) cannot be split"):
        aq.plan(step, state, batch, cluster=problem.cluster, method=aq.DataParallel())
