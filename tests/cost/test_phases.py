"""What a stage costs, by phase."""

import dataclasses

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import MeshUse, Picked, make_problem, phase_costs, price
from aliquot.sharding import layer_step, stage_step

WIDTH, ROWS, VOCABULARY = 64, 32, 4096


def train_step(state, batch):
    """A tied table at both ends of two layers."""

    def loss(params):
        x = params["table"][batch["tokens"]]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        logits = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.take_along_axis(logits, batch["targets"][:, None], 1).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def kept_bytes(stage):
    """By a stage of two for each micro-batch in flight, on one device."""
    state = {"table": jnp.zeros((VOCABULARY, WIDTH)), "layers": [jnp.zeros((WIDTH, WIDTH))] * 2}
    batch = {name: jnp.zeros((4 * ROWS,), jnp.int32) for name in ("tokens", "targets")}
    layered = layer_step(aq.capture(train_step, state, batch), 4, layers="layers[*]")
    extract = stage_step(layered, (0, 2)).extracts[stage]
    cluster = Cluster.preset("1xV100-16GB")
    problem = make_problem(extract.graph, cluster, num_micro_batches=4)
    priced = price(problem, LogicalMesh(shape=(1,), axis_names=("x",), cluster=cluster), repeats=4)
    return phase_costs(Picked.first(priced), extract.graph).in_flight_bytes


def test_arrays_of_the_backward_pass_alone_are_not_in_flight():
    """The tied gradient of the last stage comes to the first one, larger than all that a
    micro-batch keeps.
    """
    tokens, activation = 4 * ROWS, 4 * ROWS * WIDTH
    logits = 4 * ROWS * VOCABULARY
    # The input or result of each layer, and at the end what the loss keeps of the logits.
    assert tokens <= kept_bytes(0) <= tokens + 3 * activation < 4 * VOCABULARY * WIDTH
    assert activation <= kept_bytes(1) <= 3 * activation + 3 * logits + 2 * tokens


def test_casts_that_are_gathered_once_are_shared_by_the_passes_of_a_stage():
    """Whatever else both passes of a stage read, each of them gathers."""

    def step(params, batch):
        def loss(params):
            scale, weights = params
            x = batch * scale
            for w in weights:
                x = jnp.tanh(x @ w.astype(jnp.bfloat16))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    make = jax.ShapeDtypeStruct
    params = make((64,), jnp.bfloat16), [make((64, 64), jnp.float32)] * 4
    graph = aq.capture(step, params, make((32, 64), jnp.bfloat16))
    cluster = Cluster.preset("2xH100")
    problem = make_problem(graph, cluster, num_micro_batches=2, of_stage=True)
    mesh = LogicalMesh(shape=(2,), axis_names=("x",), cluster=cluster)
    use = MeshUse(mesh=mesh, data_axes=frozenset({0}))
    each, once = (
        price(problem, dataclasses.replace(use, gathers_once=gathers), repeats=2).graph.edges
        for gathers in (False, True)
    )
    casts = [edge.index for edge in problem.nodes.edges if edge.cast]
    apart = {edge.share for edge in each if edge.index in casts}
    together = {edge.share for edge in once if edge.index in casts}
    assert 0 < len(together) < len(apart)
    assert all(a.share == b.share for a, b in zip(each, once) if not a.cast)
