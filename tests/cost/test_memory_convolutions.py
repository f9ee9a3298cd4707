"""What libraries of convolutions hold, and what waits where layers normalise over the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.cluster import TARGETS, Cluster, LogicalMesh
from aliquot.cost import (
    Picked,
    decode_interior,
    make_problem,
    may_take_turns,
    price,
)
from aliquot.cost.memory import find_storage
from aliquot.graph import Phase, fold
from aliquot.planners import DataParallel
from aliquot.sharding._cuts import cut


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolve(x, kernel, order="HWIO"):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", order, "NHWC")
    )


def step_of(loss):
    def train_step(params, images):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, images))

    return train_step


def residents(cluster: str, loss, params, images=None):
    """Residents of a training step, and its graph."""
    graph = aq.capture(step_of(loss), params, array(8, 16, 16, 4) if images is None else images)
    return make_problem(graph, Cluster.preset(cluster)).residents, graph


def copies(cluster: str, loss, params):
    found, _ = residents(cluster, loss, params)
    return {r.label: r for r in found if r.label.startswith("copy of")}


@pytest.mark.parametrize("order", ["HWIO", "OHWI"])
def test_kernels_are_copied_to_have_their_features_first(order):
    shape = {"HWIO": (3, 3, 4, 32), "OHWI": (32, 3, 3, 4)}[order]

    def loss(params, images):
        return jnp.sum(jnp.tanh(convolve(images, params["kernel"], order)) ** 2)

    found = copies("8xH100", loss, {"kernel": array(*shape)})
    if order == "OHWI":
        assert not found
        return
    (copy,) = found.values()
    assert copy.num_bytes == 4 * 3 * 3 * 4 * 32
    # There from the beginning, until the update has read it.
    _, graph = residents("8xH100", loss, {"kernel": array(*shape)})
    reads = [op.index for op in graph.ops if graph.inputs[0].value in op.inputs]
    assert copy.births.tolist() == [0] and copy.deaths.tolist() == [max(reads)]
    assert not copies("8xcpu", loss, {"kernel": array(*shape)})


def test_regions_copy_kernels_anew_and_reversed_kernels_are_not_stored():
    def loss(params, images):
        def block(x, kernel):
            return jnp.tanh(convolve(jnp.tanh(convolve(x, kernel)), kernel))

        x = jax.checkpoint(block)(images, params["first"])
        return jnp.sum(jnp.tanh(convolve(x, params["last"])) ** 2)

    params = {"first": array(3, 3, 4, 4), "last": array(3, 3, 4, 8)}
    found, graph = residents("8xH100", loss, params)
    first = [r for r in found if r.label.startswith("copy of") and r.num_bytes == 4 * 9 * 4 * 4]
    lives = sorted((int(b), int(d)) for r in first for b, d in zip(r.births, r.deaths))
    inside = [op.index for op in graph.ops if op.name == "conv_general_dilated" and op.region]
    assert len(lives) == 2 and lives[0][0] == 0
    assert min(inside) <= lives[1][0] < lives[1][1] <= max(inside)
    assert any(op.name == "rev" for op in graph.ops) and not any(
        r.label.startswith("rev:") for r in found
    )
    assert any(r.label.startswith("rev:") for r in residents("8xcpu", loss, params)[0])


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu])
def test_gradients_of_maxima_need_positions_and_zeroes(activation):
    def loss(params, images):
        x = activation(convolve(images, params["kernel"]))
        return jnp.sum(
            jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            ** 2
        )

    params = {"kernel": array(3, 3, 4, 4)}
    found, graph = residents("8xH100", loss, params)
    zeroes, positions = [r for r in found if "maxima of" in r.label]
    image, windows = 4 * 8 * 16 * 16 * 4, 4 * 8 * 8 * 8 * 4
    (scatter,) = [op for op in graph.ops if op.name == "select_and_scatter_add"]
    made = next(op.index for op in graph.ops if scatter.inputs[1] in op.outputs)
    assert zeroes.num_bytes == image and zeroes.births.tolist() == [made]
    # The zeroes of a ReLU are not scattered into, but a copy.
    assert positions.num_bytes == 4 * windows + (image if activation is jax.nn.relu else 0)
    # Positions are found right before gradients are scattered to them.
    assert positions.births.tolist() == [scatter.index]
    assert zeroes.deaths.tolist() == positions.deaths.tolist() == [scatter.index]
    assert not any("maxima of" in r.label for r in residents("v5e-8", loss, params)[0])


def test_signs_are_not_stored_where_kernels_read_their_operands_anyway():
    """The gradient of a ReLU behind a normalisation is masked in kernels that read what was
    normalised for the normalisation's own gradient: to find the mask there again costs nothing.
    """

    def loss(params, images):
        x = convolve(images, params["kernel"])
        x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * params["scale"]
        return jnp.sum(convolve(jax.nn.relu(x + params["bias"]), params["last"]) ** 2)

    params = {"kernel": array(3, 3, 4, 4), "last": array(3, 3, 4, 4)}
    params |= {"scale": array(4), "bias": array(4)}
    mask = 8 * 16 * 16 * 4
    found, graph = residents("8xH100", loss, params)
    assert any(v.dtype == "bool" and v.num_bytes == mask for v in graph.values)
    assert not any(r.num_bytes == mask for r in found)


def normalised(cluster: str, recompute: bool):
    """Six convolutions, each normalised over the batch: priced for data parallelism, with its picks
    and graph.
    """

    def normalise(x):
        mean = x.mean((0, 1, 2))
        variance = (x**2).mean((0, 1, 2)) - mean**2
        return jnp.tanh((x - mean) * jax.lax.rsqrt(variance + 1e-5))

    def layer(x, first, second):
        return normalise(convolve(normalise(convolve(x, first)), second))

    def loss(params, images):
        x = images
        for kernels in params:
            x = jax.checkpoint(layer)(x, *kernels) if recompute else layer(x, *kernels)
        return jnp.sum(x**2)

    where = Cluster.preset(cluster)
    arguments = step_of(loss), [(array(3, 3, 16, 16),) * 2] * 3, array(32, 16, 16, 16)
    plan = aq.plan(*arguments, cluster=where, method=DataParallel())
    problem = make_problem(aq.capture(*arguments), where)
    choices = decode_interior(plan.stages[0], problem.nodes)
    stage = plan.stages[0]
    mesh = LogicalMesh(shape=stage.mesh_shape, axis_names=stage.axis_names, cluster=where)
    priced = price(problem, mesh, repeats=1, choices=[np.array([c], np.int64) for c in choices])
    return Picked.first(priced), problem.graph


def waiting(picked):
    """Until when operands wait for products for gradients: operators at which they are there, and
    until which.
    """
    edges = picked.priced.graph.edges
    found = []
    for c, _ in picked.memory.conversions:
        edge = edges[c.edges[0]]
        if edge.kind == "result" and edge.gradient:
            found += zip(c.births.tolist(), c.deaths.tolist())
    return found


def test_products_run_beside_sums_over_the_batch():
    """What waits for all-reduced gradients is gone before the update, and the more so the fewer
    sums there are beside.
    """
    shares = {}
    for recompute in (False, True):
        picked, graph = normalised("4xH100", recompute)
        # For each gradient, and once more where a product of a recomputed layer follows.
        assert picked.priced.graph.batch_sums == (9 if recompute else 6)
        assert not may_take_turns(picked.priced)
        last = max(op.index for op in graph.ops if op.phase is Phase.BACKWARD)
        waits = waiting(picked)
        assert max(until for _, until in waits) <= last
        first = min(waits)
        shares[recompute] = (last - first[1]) / (last - first[0])
    assert shares[False] > 1.2 * shares[True] > 0


def test_no_products_are_deferred_on_one_device():
    picked, _ = normalised("1xH100", True)
    assert not waiting(picked)


def test_sums_over_the_same_array_are_not_deferred():
    """The gradient of a bias is summed over the batch in the kernel that sums for the mean; that of
    the last layer not.
    """

    def loss(params, images):
        x = images @ params["kernel"]
        x = (x - x.mean((0, 1, 2))) * params["scale"] + params["bias"]
        x = jnp.tanh(x) @ params["last"] + params["other"]
        return jnp.sum(jnp.tanh(x) ** 2)

    params = {"kernel": array(4, 8), "last": array(8, 16)}
    params |= {"scale": array(1, 1, 1, 8), "bias": array(1, 1, 1, 8), "other": array(1, 1, 1, 16)}
    graph = aq.capture(step_of(loss), params, array(8, 16, 16, 4))
    cuts = cut(graph, fold(graph), "error")
    runs_at = find_storage(cuts, TARGETS["gpu"]).late_run
    sums = [op for op in graph.ops if op.name == "reduce_sum" and op.phase is Phase.BACKWARD]
    wide = {v for v, value in enumerate(graph.values) if value.shape == (8, 16, 16, 8)}
    waits = {
        size: [op for op in sums if graph.values[op.outputs[0]].shape == (size,)]
        for size in (8, 16)
    }
    # What the sum for the scale reads is read by no other.
    assert sorted(runs_at[op.index] > op.index for op in waits[8] if op.inputs[0] in wide) == [
        False,
        False,
        True,
    ]
    assert len(waits[16]) == 1 and all(runs_at[op.index] > op.index for op in waits[16])
