"""What compilers do with memory: each habit of a target, on a step where it shows, and in the
direction it must go.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import TARGETS, Cluster, LogicalMesh, target_for
from aliquot.cost import (
    MeshUse,
    Picked,
    decode_interior,
    make_problem,
    memory_model,
    price,
)
from aliquot.cost.memory import find_storage
from aliquot.graph import Phase, fold
from aliquot.planners import DataParallel, Megatron, Zero2Parallel, Zero3Parallel
from aliquot.sharding import _reshard, plan_micro_batches
from aliquot.sharding._cuts import cut


def workload(
    *,
    scan: bool = False,
    recompute: str = "none",
    sequences: int = 8,
    hidden_size: int = 64,
    **settings,
):
    config = zoo.configure(
        "llama-7b",
        num_layers=3,
        hidden_size=hidden_size,
        num_heads=4,
        seq_len=32,
        vocab_size=512,
        ffn_size=256,
    )
    return zoo.build(config, sequences, dtype="float32", scan=scan, recompute=recompute, **settings)


# The habit, the target without it, a step, a method, and whether the habit makes the peak higher.
HABITS = {
    "work is repeated": (
        {"repeats_cheap_work": False},
        {"recompute": "none"},
        DataParallel(),
        False,
    ),
    "parameters are gathered ahead": (
        {"gathered_ahead": 0.0},
        {"recompute": "block", "hidden_size": 2048, "optimizer": "sgd"},
        Zero3Parallel(),
        True,
    ),
    "gathers are along the leading dim": (
        {"gathers_leading_dim": False},
        {"scan": True},
        Zero3Parallel(),
        True,
    ),
    "results wait for a reduce-scatter": (
        {"combined_bytes": 0},
        {"recompute": "block", "sequences": 64, "hidden_size": 256},
        Zero2Parallel(),
        True,
    ),
    "products wait beside all-reduces": (
        {"hides_latency": True},
        {"recompute": "block", "sequences": 256, "hidden_size": 256},
        DataParallel(),
        False,
    ),
    "products wait for layers' collectives": (
        {"hides_latency": True},
        {"recompute": "block", "sequences": 256, "hidden_size": 256},
        Zero3Parallel(),
        False,
    ),
}


def peak(work, cluster: str, method, num_micro_batches: int = 1) -> float:
    """Predicted bytes of the plan of a method."""
    arguments = work.train_step, work.state, work.batch
    plan = aq.plan(
        *arguments,
        cluster=Cluster.preset(cluster),
        method=method,
        num_micro_batches=num_micro_batches,
        recompute=None if work.settings["recompute"] != "none" else "none",
    )
    return plan.prediction.peak_memory_bytes


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_moves_the_peak(name, monkeypatch):
    without, settings, method, higher = HABITS[name]
    given = workload(**settings), "4xA100-80GB", method
    usual = peak(*given)
    monkeypatch.setitem(TARGETS, "gpu", dataclasses.replace(TARGETS["gpu"], **without))
    assert (usual > peak(*given) * 1.01) if higher else (usual * 1.01 < peak(*given))


def test_gradients_of_a_turn_of_a_loop_are_computed_at_its_end():
    """The array that the last product of a layer reads is read again, for the weight's gradient,
    after all gradients of activations.
    """
    work = workload(scan=True)
    graph = aq.capture(work.train_step, work.state, work.batch)
    products = [
        op
        for op in graph.ops
        if op.name == "dot_general" and op.phase is Phase.BACKWARD and op.trips > 1
    ]
    shapes = [graph.values[op.outputs[0]].shape for op in products]
    of_weight = products[shapes.index((256, 64))]
    of_activations = [op for op, s in zip(products, shapes, strict=True) if s == (8, 32, 64)]
    assert of_weight.index < of_activations[-1].index
    for cluster in ("4xH100", "4xA100-80GB"):
        target = target_for(Cluster.preset(cluster).device)
        last_use = find_storage(cut(graph, fold(graph), "infer"), target).last_use
        assert max(last_use[i] for i in of_weight.inputs) > of_activations[-1].index


# The same for TPUs: the target without the habit, a step, micro-batches, and whether the habit
# makes the peak higher.
TPU_HABITS = {
    "work is repeated": (
        {"repeats_cheap_work": False},
        {"recompute": "none", "sequences": 64},
        1,
        False,
    ),
    "operands are stored narrow": (
        {"held_product_bytes": 0},
        {"scan": True, "sequences": 64},
        1,
        False,
    ),
    "parameters are cast before loops": (
        {"held_product_bytes": 0},
        {"scan": True, "hidden_size": 512, "recompute": "block"},
        1,
        True,
    ),
    "parameters are cast before micro-batches": (
        {"held_product_bytes": 0},
        {"hidden_size": 512},
        2,
        True,
    ),
}
BLOCKS = {"recompute": "block", "sequences": 256, "hidden_size": 256}


@pytest.mark.parametrize("name", TPU_HABITS)
def test_a_habit_for_tpus_moves_the_peak(name, monkeypatch):
    without, settings, micro_batches, higher = TPU_HABITS[name]
    given = workload(**settings), "v5e-4", DataParallel(), micro_batches
    usual = peak(*given)
    monkeypatch.setitem(TARGETS, "tpu", dataclasses.replace(TARGETS["tpu"], **without))
    assert (usual > peak(*given) * 1.01) if higher else (usual * 1.01 < peak(*given))


@pytest.mark.parametrize("method", [DataParallel(), Zero3Parallel()])
def test_tpus_defer_products_beside_reduce_scatters_but_not_beside_all_reduces(method, monkeypatch):
    """Operands wait for the former; the latter run in turn, as if no latency were hidden, and their
    results wait.
    """
    work = workload(**BLOCKS)

    def with_habits(**habits: bool) -> float:
        monkeypatch.setitem(TARGETS, "tpu", dataclasses.replace(usual, **habits))
        return peak(work, "v5e-4", method)

    usual = TARGETS["tpu"]
    in_turn = with_habits(hides_latency=False)
    if isinstance(method, DataParallel):
        assert with_habits() == pytest.approx(in_turn, rel=0.01)
        assert abs(with_habits(overlaps_all_reduces=True) / in_turn - 1) > 0.01
    else:
        assert with_habits() > 1.01 * in_turn


def residents_for(cluster: str, train_step, *arguments, micro_batches: int = 1):
    graph = aq.capture(train_step, *arguments)
    return make_problem(graph, Cluster.preset(cluster), num_micro_batches=micro_batches).residents


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_tpus_cast_each_parameter_once_for_all_turns_of_a_loop(dtype):
    """Those that products read in a loop, at two bytes an element: weights of layers, and with
    micro-batches the head too.
    """
    config = zoo.configure(
        "llama-7b",
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        seq_len=32,
        vocab_size=512,
        ffn_size=256,
    )
    work = zoo.build(config, 8, dtype=dtype, scan=True)

    def casts(cluster: str, micro_batches: int) -> dict[str, int]:
        found = residents_for(
            cluster, work.train_step, work.state, work.batch, micro_batches=micro_batches
        )
        return {r.label: r.num_bytes for r in found if r.label.startswith("cast of")}

    layers = casts("v5e-4", 1)
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 256)
    assert len(layers) == 7 and sum(layers.values()) == 2 * weights
    everything = casts("v5e-4", 2)
    assert layers.items() < everything.items()
    assert everything["cast of state.params.head.kernel"] == 2 * 64 * 512
    assert not casts("4xA100-80GB", 2)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_tpus_store_operands_of_products_as_bfloat16(precision):
    """The first product's result is also squared, the second product's operand is not."""

    def train_step(params, x):
        def loss(w):
            h = jnp.dot(x, w["in"], precision=precision)
            inner = jnp.dot(jnp.tanh(h), w["middle"], precision=precision)
            return (jnp.dot(jnp.tanh(inner), w["out"], precision=precision) ** 2).sum() + (
                h**2
            ).sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in ("in", "middle", "out")}
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    whole = 4 * 4096 * 64

    def sizes(cluster: str) -> set[int]:
        found = residents_for(cluster, train_step, params, x)
        return {r.num_bytes for r in found if r.num_bytes >= whole // 2 and r.category != "batch"}

    assert sizes("v5e-4") == ({whole, whole // 2} if precision is None else {whole})
    assert sizes("4xA100-80GB") == {whole}


def held(cluster: str, method, num_micro_batches=1, **settings):
    """What a plan holds in more than one split, or for longer than it is used: conversions, their
    bytes, and their edges.
    """
    work = workload(**({"recompute": "block", "hidden_size": 256} | settings))
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=Cluster.preset(cluster),
        method=method,
        num_micro_batches=num_micro_batches,
    )
    graph = aq.capture(work.train_step, work.state, work.batch)
    if num_micro_batches > 1:
        graph = plan_micro_batches(graph, num_micro_batches).part
    problem = make_problem(graph, Cluster.preset(cluster), num_micro_batches=num_micro_batches)
    choices = decode_interior(plan.stages[0], problem.nodes)
    mesh = LogicalMesh(
        shape=plan.stages[0].mesh_shape,
        axis_names=plan.stages[0].axis_names,
        cluster=Cluster.preset(cluster),
    )
    priced = price(
        problem,
        mesh,
        repeats=num_micro_batches,
        choices=[np.array([c], np.int64) for c in choices],
    )
    found = Picked.first(priced).memory.conversions
    return [(c, num_bytes, problem.nodes.edges[c.edges[0]]) for c, num_bytes in found]


def waiting_bytes(cluster: str, method, **settings) -> float:
    """What each device holds for products for gradients, or of their results, beyond the last other
    use of it.
    """
    return sum(
        b
        for _, b, edge in held(cluster, method, **settings)
        if edge.kind == "result" and edge.gradient
    )


def test_products_whose_results_exceed_their_operands_run_last():
    """Where memory is saved: a gradient of 256 x 256 from 64 rows on each device takes more than
    its operands, of 4096 less.
    """
    assert waiting_bytes("4xA100-80GB", DataParallel(), sequences=8) > 0
    assert waiting_bytes("4xA100-80GB", DataParallel(), sequences=512) == 0
    # Where latency is hidden these products wait whatever they take.
    assert waiting_bytes("4xH100", DataParallel(), sequences=512) > 0


def test_products_that_tensor_parallelism_splits_wait_in_each_micro_batch():
    """They run beside the collectives of other layers; with data parallelism there are none, as
    gradients are summed over devices only once.
    """
    waiting = {"sequences": 512, "num_micro_batches": 2}
    assert waiting_bytes("4xH100", Megatron(tensor=4), **waiting) > 0
    assert waiting_bytes("4xH100", DataParallel(), **waiting) == 0
    assert waiting_bytes("4xA100-80GB", Megatron(tensor=4), **waiting) == 0


def test_stacks_of_weights_are_turned_for_products_in_8_bits():
    """Of those whose products are computed again for the backward pass, as their number decides."""
    config = zoo.configure("llama3-8b", num_layers=2, hidden_size=256, seq_len=64, vocab_size=512)

    def copies(dtype, scan):
        work = zoo.build(config, 8, dtype=dtype, recompute="save_qkv", scan=scan)
        found = residents_for("4xH100", work.train_step, work.state, work.batch)
        return {r.label.rpartition("layers.")[2] for r in found if r.label.startswith("copy of")}

    assert copies("fp8", True) == {"attn.out.kernel", "mlp.gate.kernel", "mlp.up.kernel"}
    assert copies("bf16", True) == copies("fp8", False) == set()


def test_no_product_waits_beside_maxima_of_magnitudes():
    """They scale the 8-bit floats of a later step, and stand between no products, as sums over the
    batch do in a batch normalization.
    """
    config = zoo.configure("llama3-8b", num_layers=2, hidden_size=256, seq_len=64, vocab_size=512)
    work = zoo.build(config, 8, dtype="fp8", recompute="none")
    graph = aq.capture(work.train_step, work.state, work.batch)
    assert make_problem(graph, Cluster.preset("4xH100")).nodes.batch_sums == 0


def test_products_run_in_turn_where_layers_have_collectives_beside_all_reduces():
    """Less waits then: what is known lies between what waits if they do and if they do not."""
    work = workload(recompute="block", sequences=64, hidden_size=256)
    cluster = Cluster.preset("4xH100")
    problem = make_problem(aq.capture(work.train_step, work.state, work.batch), cluster)
    priced = price(problem, LogicalMesh(shape=(2, 2), axis_names=("x", "y"), cluster=cluster))
    rng = np.random.default_rng(0)
    least, most = (memory_model(priced, in_turn=in_turn) for in_turn in (True, False))
    saved = []
    for _ in range(40):
        picks = np.array([rng.integers(len(n.choices)) for n in priced.nodes])
        picked = Picked(priced=priced, picks=picks)
        known, low, high = (
            memory.over_time()
            for memory in (picked.memory, least.under(picked), most.under(picked))
        )
        assert (low <= known * (1 + 1e-12)).all() and (known <= high * (1 + 1e-12)).all()
        saved.append((known < high * 0.999).any())
    assert any(saved) and not all(saved)


def test_new_parameters_wait_for_all_gathers_before_they_are_copied():
    """Stacks of 3 layers are split along another dim than the first: what is gathered is copied to
    its place at the end.
    """

    def gathered(cluster: str, **settings) -> list:
        return [
            (c, b)
            for c, b, edge in held(cluster, Zero2Parallel(), **settings)
            if edge.kind == "alias"
        ]

    stacks = gathered("4xH100", scan=True)
    assert max(num_bytes for _, num_bytes in stacks) == 4 * 3 * 256 * 256
    assert len({int(m) for c, _ in stacks for m in (*c.births, *c.deaths)}) == 1
    # Layers by themselves are mostly split along the first dim.
    assert 2 * sum(b for _, b in gathered("4xH100")) < sum(b for _, b in stacks)
    assert not gathered("4xA100-80GB", scan=True)


def test_stacks_that_are_gathered_row_by_row_are_held_once(monkeypatch):
    work = workload(scan=True, recompute="block", hidden_size=256)
    kernel = "new state.params.layers.mlp.down.kernel"

    def found() -> tuple[int, float, float, float]:
        """How many stacks are held twice, and the gathers of one of them."""
        twice = [
            e
            for _, _, e in held("4xH100", Zero2Parallel(), scan=True)
            if e.kind == "alias" and e.rank == 3
        ]
        arguments = work.train_step, work.state, work.batch
        plan = aq.plan(*arguments, cluster=Cluster.preset("4xH100"), method=Zero2Parallel())
        (use,) = [use for use in plan.prediction.collectives if use.label == kernel]
        return len(twice), use.count, use.num_bytes, use.seconds

    whole = found()
    monkeypatch.setattr(_reshard, "_LEAST_ROW_BYTES", 1)
    monkeypatch.setitem(TARGETS, "gpu", dataclasses.replace(TARGETS["gpu"], combined_bytes=1))
    rows = found()
    assert whole[0] > 0 == rows[0]
    assert (whole[1], rows[1]) == (1, 3)
    assert rows[2] == whole[2] and rows[3] > whole[3]


def test_cheap_work_is_not_stored():
    """Logits in single precision are computed again from those in half precision, in each kernel
    that reads them.
    """
    work = zoo.build(zoo.configure("gpt-10m", num_layers=1), 8, dtype="bf16")
    graph = aq.capture(work.train_step, work.state, work.batch)
    logits = 4 * 8 * 128 * 256

    def stored(cluster: str) -> int:
        residents = make_problem(graph, Cluster.preset(cluster)).residents
        return sum(r.num_bytes == logits and "scatter" not in r.label for r in residents)

    assert stored("2xH100") < stored("2xcpu")


@pytest.mark.parametrize("scan", [False, True])
def test_every_device_sums_whole_gradients_over_micro_batches(scan):
    """Axes that split nothing but the batch do not divide the totals; loops over layers stack up
    another copy.
    """
    work = workload(scan=scan)
    graph = aq.capture(work.train_step, work.state, work.batch)
    cluster = Cluster.preset("2xH100")
    problem = make_problem(graph, cluster, num_micro_batches=2)
    mesh = LogicalMesh(shape=(2,), cluster=cluster)
    priced = price(problem, MeshUse(mesh=mesh, data_axes=frozenset({0})), repeats=2)
    model = memory_model(priced, in_turn=False)
    totals = stacks = 0.0
    for r, local in zip(model.residents, model.local_bytes):
        if r.category != "gradients":
            continue
        assert (local == r.num_bytes).all()
        if (r.births == 0).all() and (r.deaths == len(graph.ops)).all():
            totals += r.num_bytes * len(r.births)
        else:
            assert r.stacked
            stacks += r.num_bytes * len(r.births)
    parameters = sum(
        4 * int(np.prod(graph.values[i.value].shape)) for i in graph.inputs if "params" in i.path
    )
    assert totals == pytest.approx(parameters, rel=0.02)
    assert (stacks > 0.5 * totals) is scan


@pytest.mark.parametrize("scan", [False, True], ids=["written out", "scanned"])
def test_products_run_when_their_results_are_needed_where_latency_is_hidden(scan):
    """The gradient of attention's values waits, and the weights for it, until the other product's
    way has gone on.
    """

    work = workload(recompute="block", sequences=16, scan=scan)
    scores = 4 * 16 * 4 * 32 * 32

    def most_at_once(cluster: str) -> int:
        found = residents_for(cluster, work.train_step, work.state, work.batch)
        lives = [(b, d) for r in found if r.num_bytes == scores for b, d in zip(r.births, r.deaths)]
        return max(sum(b <= moment <= d for b, d in lives) for moment, _ in lives)

    assert most_at_once("2xH100") == most_at_once("2xA100-80GB") + 1


def test_little_waits_where_products_take_long_compared_with_gathers():
    """Of parameters that are split over all devices, products for gradients wait for about four
    layers at 2,400 tokens a device, and for fewer with more tokens.
    """

    def usual_wait(sequences: int) -> float:
        waits = [
            (c.deaths - c.births).max()
            for c, _, edge in held("4xH100", Zero3Parallel(), sequences=sequences)
            if edge.kind == "result" and edge.gradient
        ]
        return float(np.median(waits))

    assert usual_wait(8192) < 0.5 * usual_wait(64)


def test_products_wait_beside_sums_of_activations_however_long_they_take():
    """With tensor parallelism, products for gradients run about halfway to the end, with many
    tokens as with few.
    """

    def usual_wait(sequences: int) -> float:
        waits = [
            (c.deaths - c.births).max()
            for c, _, edge in held("4xH100", Megatron(tensor=4), sequences=sequences)
            if edge.kind == "result" and edge.gradient
        ]
        return float(np.median(waits))

    assert usual_wait(4096) == usual_wait(64) > 0


@pytest.mark.parametrize(
    ("model", "waits"), [("gpt-10m", True), ("llama-7b", False)], ids=["LayerNorm", "RMSNorm"]
)
def test_sums_for_scales_wait_only_beside_sums_for_biases(model, waits):
    """What a LayerNorm reads is alive until its scale's and its bias's gradients are summed at the
    end; the gradient of an RMSNorm's scale is summed in the kernel of the layer's own gradient.
    """
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 512}
    work = zoo.build(zoo.configure(model, **sizes), 8, dtype="bf16")
    graph = aq.capture(work.train_step, work.state, work.batch)
    cuts = cut(graph, fold(graph), "infer")
    storage = find_storage(cuts, target_for(Cluster.preset("4xH100").device))
    sums = [
        op
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        and op.name == "reduce_sum"
        and graph.values[op.outputs[0]].shape == (64,)
        and traced(graph, op.inputs[0]) == "mul"
    ]
    assert len(sums) >= 6
    assert all((storage.late_run[op.index] > op.index) == waits for op in sums)


def test_a_long_chain_of_squares_is_looked_through_once():
    """Every turn doubles the number of ways back through the chain."""

    def loss(params, x):
        y = x @ params["weight"]
        for _ in range(40):
            y = y * y
        return jnp.sum(y * params["scale"])

    def train_step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    params = {"weight": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    params |= {"scale": jax.ShapeDtypeStruct((8,), jnp.float32)}
    graph = aq.capture(train_step, params, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    cuts = cut(graph, fold(graph), "infer")
    find_storage(cuts, target_for(Cluster.preset("4xH100").device))


def traced(graph, value: int) -> str:
    """The operator that made a value, behind casts."""
    maker = {out: op for op in graph.ops for out in op.outputs}
    while maker[value].name == "convert_element_type":
        value = maker[value].inputs[0]
    return maker[value].name


def test_less_is_gathered_ahead_where_products_take_long_compared_with_gathers():
    sizes = {"hidden_size": 2048, "optimizer": "sgd"}

    def gathered_at_the_start(sequences: int) -> float:
        return sum(
            b
            for c, b, edge in held("4xH100", Zero3Parallel(), sequences=sequences, **sizes)
            if edge.parameter and edge.kind == "operand" and c.births.min() == 0
        )

    assert gathered_at_the_start(4096) < gathered_at_the_start(4)


@pytest.mark.parametrize("method", [DataParallel(), Zero3Parallel()], ids=["dp", "zero3"])
def test_a_table_alone_is_trained_without_products_for_gradients(method):
    def train_step(state, rows):
        def loss(table):
            hidden = jnp.take(table, rows, axis=0) @ state["up"] @ state["down"]
            return jnp.mean(jnp.tanh(hidden) ** 2)

        grad = jax.grad(loss)(state["table"])
        return {**state, "table": state["table"] - 0.1 * grad}

    sizes = {"table": (4096, 1024), "up": (1024, 512), "down": (512, 1024)}
    state = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    rows = jax.ShapeDtypeStruct((64, 8), jnp.int32)
    plan = aq.plan(train_step, state, rows, cluster=Cluster.preset("8xH100"), method=method)
    table_bytes = 4 * 4096 * 1024 / (8 if method == Zero3Parallel() else 1)
    assert plan.prediction.peak_memory_bytes > table_bytes


# What XLA stores of a GELU between the passes, as compiled for each: the product, the result, and
# tanh's, which A100s hold as they compute it.
@pytest.mark.parametrize(("device", "tanh_bytes"), [("A100-40GB", 4), ("H100", 2)])
def test_results_of_slow_functions_are_stored_once(device, tanh_bytes):
    size = 256 * 4096

    def loss(weight, x):
        return jnp.sum(jax.nn.gelu(x @ weight, approximate=True).astype(jnp.float32))

    def train_step(weight, x):
        return weight - jax.grad(loss)(weight, x)

    arrays = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 4096), (256, 128)))
    graph = aq.capture(train_step, *arrays)
    problem = make_problem(graph, Cluster.preset(f"1x{device}"), memory_limit_bytes=1e12)
    (tanh,) = (op for op in graph.ops if op.name == "tanh")
    found = [r.num_bytes for r in problem.residents if r.label.startswith(f"tanh:{tanh.index}")]
    assert found == [tanh_bytes * size]


def test_a_stack_that_a_loop_reads_lives_until_the_last_turn():
    """Each turn reads a row, so that no row's place is free before the loop ends, however early in
    its body a turn reads it.
    """
    work = workload(scan=True, recompute="minimal")
    graph = aq.capture(work.train_step, work.state, work.batch)
    residents = make_problem(graph, Cluster.preset("2xH100")).residents
    stacks = [r for r in residents if r.stacked and r.category == "activations"]
    body = [op.index for op in graph.ops if op.phase is Phase.BACKWARD and op.trips > 1]
    ends = [int(stack.deaths.max()) for stack in stacks]
    last = max(index for index in body if not graph.ops[index].is_link)
    assert len(stacks) > 2 and min(ends) >= last


@pytest.mark.parametrize("scan", [False, True], ids=["written out", "scanned"])
def test_stacks_are_turned_before_loops_as_they_are_stored(scan):
    """What is gathered along its second dim is copied with that dim first: written out after it was
    cast, and before a loop in single precision, since the loop's body casts it.
    """
    config = zoo.configure("llama-7b", num_layers=3, hidden_size=64, num_heads=4, seq_len=32)
    work = zoo.build(config, 8, dtype="bf16", scan=scan)
    graph = aq.capture(work.train_step, work.state, work.batch)
    decision = Zero3Parallel().solve(make_problem(graph, Cluster.preset("2xH100")))
    priced = decision.picked.priced
    end = priced.graph.num_ops
    (turned,) = [
        num_bytes
        for copy, num_bytes in decision.picked.memory.conversions
        if priced.graph.edges[copy.edges[0]].label.endswith("mlp.gate.kernel")
        and (copy.births == 0).all()
        and (copy.deaths == end).all()
    ]
    elements = config.ffn_size * config.hidden_size
    assert turned == (3 * 4 if scan else 2) * elements / 2
