"""Memory over time, against a simulation that goes through a step operator by operator."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from planners.small_steps import array, classifier, mlp

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import (
    Picked,
    PlannedStep,
    estimate,
    make_problem,
    memory_model,
    price,
)
from aliquot.graph import Graph
from aliquot.planners import ShardParallel, Zero3Parallel
from aliquot.sharding import project, reshard


def tiny_gpt():
    config = zoo.configure(
        "gpt-125m", num_layers=3, hidden_size=32, num_heads=4, seq_len=16, vocab_size=64
    )
    workload = zoo.build(config, 8, optimizer="adamw", recompute="block")
    return workload.train_step, workload.state, workload.batch


STEPS = {"mlp": mlp((16, 32, 16), 8), "classifier": classifier(8, 16, 64), "gpt": tiny_gpt()}


def simulated(problem, priced, picks) -> np.ndarray:
    """Bytes while each operator runs: everything that is alive, one by one."""
    nodes = problem.nodes
    use = [0.0] * (nodes.num_ops + 1)

    def spec(node, projection):
        choice = tuple(int(f) for f in priced.nodes[node].choices[picks[node]])
        return project(choice, projection)

    def local(num_bytes, split):
        return num_bytes / math.prod(n for n, p in zip(priced.axis_sizes, split) if p >= 0)

    for r in problem.residents:
        num_bytes = local(r.num_bytes, spec(r.node, r.projection)) if r.node >= 0 else r.num_bytes
        for birth, death in zip(r.births, r.deaths):
            for moment in range(birth, death + 1):
                use[moment] += num_bytes
    shared = {}
    for edge in nodes.edges:
        if edge.kind == "operand":
            shared.setdefault(edge.share, []).append(edge)
    for edges in shared.values():
        copies = {}
        for edge in edges:
            source = spec(edge.source, edge.source_projection)
            target = spec(edge.target, edge.target_projection)
            if reshard(source, target, priced.axis_sizes, priced.target.sum_collective):
                copies[source, target] = local(edge.num_bytes, target)
        for k in range(len(edges[0].starts)):
            first, last = min(e.starts[k] for e in edges), max(e.ends[k] for e in edges)
            for moment in range(first, last + 1):
                use[moment] += sum(copies.values())
    return np.array(use)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_timeline_is_what_is_alive(name, shape):
    """On a target whose compiler has no habits of its own."""
    cluster = Cluster.preset("4xcpu")
    problem = make_problem(aq.capture(*STEPS[name]), cluster)
    priced = price(problem, LogicalMesh(shape=shape, cluster=cluster))
    model = memory_model(priced, in_turn=False)
    rng = np.random.default_rng(0)
    for _ in range(5):
        picks = np.array([rng.integers(len(node.choices)) for node in priced.nodes])
        memory = model.under(Picked(priced=priced, picks=picks))
        use = memory.over_time()
        assert use == pytest.approx(simulated(problem, priced, picks), rel=1e-9)
        assert memory.peak_bytes == use.max() == use[memory.peak_moment]
        assert sum(memory.peak_parts.values()) == pytest.approx(memory.peak_bytes, rel=1e-9)


def _forward(graph: Graph, name: str) -> int:
    return next(op.index for op in graph.ops if op.name == name)


def test_an_array_lives_while_a_fused_reader_does():
    """What a fused operator makes is no array: its operand stays until the last reader of the
    result.
    """

    def step(params, batch):
        early = batch["x"] @ params["a"]
        fused = early * 2.0
        late = jnp.tanh(batch["x"] @ params["b"]) @ params["b"]
        return late + fused

    params = {"a": array(16, 16), "b": array(16, 16)}
    graph = aq.capture(step, params, {"x": array(8, 16)})
    problem = make_problem(graph, Cluster.preset("2xH100"))
    first = _forward(graph, "dot_general")
    alive = [
        (int(r.births[0]), int(r.deaths[0])) for r in problem.residents if r.births[0] == first > -1
    ]
    assert (first, _forward(graph, "add")) in alive
    assert all(r.births[0] != _forward(graph, "mul") for r in problem.residents)


def test_inputs_live_all_the_time_and_successors_in_their_place():
    graph = aq.capture(*STEPS["mlp"])
    problem = make_problem(graph, Cluster.preset("2xH100"))
    whole = {"parameters": 0, "optimizer state": 0, "batch": 0}
    for r in problem.residents:
        if r.category in whole:
            assert (r.births == 0).all() and (r.deaths == len(graph.ops)).all()
            whole[r.category] += r.num_bytes * len(r.births)
    weights = 4 * 2 * 16 * 32
    assert whole == {"parameters": weights, "optimizer state": weights, "batch": 4 * 2 * 8 * 16}


def test_micro_batches_hold_their_gradients():
    """Sums over micro-batches live from the first to the last."""
    cluster = Cluster.preset("2xH100")
    graph = aq.capture(*STEPS["mlp"])
    mesh = LogicalMesh(shape=(2,), cluster=cluster)
    once, twice = (
        memory_model(price(make_problem(graph, cluster), mesh, repeats=repeats), in_turn=False)
        for repeats in (1, 2)
    )
    for a, b in zip(once.residents, twice.residents):
        if a.category == "gradients":
            assert (b.births == 0).all() and (b.deaths == a.deaths).all()
        else:
            assert (b.births == a.births).all() and (b.deaths == a.deaths).all()


def test_gradients_that_wait_for_their_sum_count_whole():
    """Without micro-batches, each is whole on every device until it is summed and sharded."""
    plan = aq.plan(
        *mlp((256, 512, 256), 16), cluster=Cluster.preset("8xH100"), method=Zero3Parallel()
    )
    memory = plan.prediction.memory_bytes
    assert memory["unreduced gradients"] >= 4 * 2 * 256 * 512
    assert memory["unreduced gradients"] > memory["resharded copies"] > 0


def test_the_limit_is_kept():
    step = mlp((256, 1024, 256), 512)
    cluster = Cluster.preset("8xH100")
    method = ShardParallel(mesh_shape=(4, 2))
    free = aq.plan(*step, cluster=cluster, method=method)
    tight = aq.plan(
        *step,
        cluster=cluster,
        method=method,
        memory_limit_bytes=0.8 * free.prediction.peak_memory_bytes,
    )
    assert tight.prediction.peak_memory_bytes <= 0.8 * free.prediction.peak_memory_bytes
    problem = make_problem(
        aq.capture(*step), cluster, memory_limit_bytes=0.8 * free.prediction.peak_memory_bytes
    )
    assert estimate(PlannedStep.of_program(tight, problem.graph, problem)) == tight.prediction


@pytest.mark.parametrize("name", STEPS)
def test_memory_over_time_passes_through_the_peak_of_the_prediction(name):
    problem = make_problem(aq.capture(*STEPS[name]), Cluster.preset("8xH100"))
    plan = aq.plan(*STEPS[name], cluster=Cluster.preset("8xH100"), method=Zero3Parallel())
    curve = plan.prediction.memory_over_time
    totals = np.sum(list(curve.parts.values()), axis=0)
    assert totals.max() == pytest.approx(plan.prediction.peak_memory_bytes, abs=1)
    at_peak = {part: values[int(np.argmax(totals))] for part, values in curve.parts.items()}
    assert {part: value for part, value in at_peak.items() if value} == pytest.approx(
        plan.prediction.memory_bytes, abs=1
    )
    order = ["prologue", "forward", "backward", "update"]
    assert [order.index(phase) for phase in curve.phases] == sorted(
        order.index(phase) for phase in curve.phases
    )
    assert 1 < len(curve.phases) <= min(96, len(problem.graph.ops) + 1)
    assert curve.seconds[0] == 0 and curve.seconds[-1] == plan.prediction.step_time_s
    assert list(curve.seconds) == sorted(curve.seconds)


def test_memory_over_time_gives_each_phase_its_time():
    """Two of five products are forward, and tanh and the loss; the update only reads and writes."""
    plan = aq.plan(
        *mlp((1024, 1024, 1024), 8192),
        cluster=Cluster.preset("1xH100"),
        method=aq.DataParallel(),
    )
    curve = plan.prediction.memory_over_time
    step_s = plan.prediction.step_time_s
    backward, update = (curve.seconds[curve.phases.index(p)] for p in ("backward", "update"))
    assert 0.4 < backward / step_s < 0.5 and 0.9 < update / step_s < 1
