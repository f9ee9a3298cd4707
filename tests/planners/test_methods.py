"""What every method promises, one table for all; and what each of them is."""

import math

import jax
import jax.numpy as jnp
import msgspec
import pytest
from planners.small_steps import mlp

import aliquot as aq
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.core import ClusterError, InfeasibleError, InputError, PlanMismatchError
from aliquot.cost import (
    MeshUse,
    PlannedStep,
    decode_interior,
    encode_interior,
    estimate,
    make_problem,
    price,
)
from aliquot.planners import (
    ILP,
    Auto,
    DataParallel,
    Interrupted,
    ManualParallel,
    ShardParallel,
    Task,
    WholeProgram,
    Zero2Parallel,
    Zero3Parallel,
    method_by_name,
)
from aliquot.planners.intra.fixed._restrict import _matches
from aliquot.plans import fact_rows

CLUSTER = Cluster.preset("2x4xH100")
SIZES = (256, 1024, 256)
STEP = mlp(SIZES, 64)
PARAMETERS = ("state.params[0]", "state.params[1]")
MOMENTS = ("state.moments[0]", "state.moments[1]")
COLUMN_THEN_ROW = {"state.params[0]": (None, "y"), "state.params[1]": ("y",), "batch.*": ("x",)}

ALL_METHODS = {
    "dp": DataParallel(),
    "zero2": Zero2Parallel(),
    "zero2 within a host": Zero2Parallel(shard_within="host"),
    "zero3": Zero3Parallel(),
    "zero3 within a host": Zero3Parallel(shard_within="host"),
    "manual": ManualParallel(specs=COLUMN_THEN_ROW, mesh_shape=(2, 4)),
    "shard": ShardParallel(),
    "shard on 2x4": ShardParallel(mesh_shape=(2, 4)),
    "shard on 2x2x2": ShardParallel(mesh_shape=(2, 2, 2)),
    "program": WholeProgram(),
    "auto on 2x4": Auto(mesh_shape=(2, 4)),
    "auto": Auto(),
}
# `Auto` is free to leave hosts idle and to make stages.
ONE_PROGRAM_ON_ALL_DEVICES = [name for name in ALL_METHODS if name != "auto"]


@pytest.fixture(scope="module")
def problem():
    return make_problem(aq.capture(*STEP), CLUSTER)


@pytest.fixture(scope="module")
def plans():
    """A plan of each method, made when it is first asked for."""
    made = {}

    def plan(name):
        if name not in made:
            made[name] = aq.plan(*STEP, cluster=CLUSTER, method=ALL_METHODS[name])
        return made[name]

    return plan


@pytest.fixture(params=ONE_PROGRAM_ON_ALL_DEVICES)
def plan(request, plans):
    return plans(request.param)


def shards(plan, path):
    """Into how many pieces a plan splits an input, and by which axes."""
    stage = plan.stages[0]
    sizes = dict(zip(stage.axis_names, stage.mesh_shape))
    axes = [a for dim in stage.shardings[path] for a in dim]
    return math.prod(sizes[a] for a in axes), axes


@pytest.mark.parametrize("name", ALL_METHODS)
def test_planning_twice_gives_the_same(name, plans):
    again = aq.plan(*STEP, cluster=CLUSTER, method=ALL_METHODS[name])
    assert again == plans(name) and again.to_json() != ""


def test_prediction_is_that_of_the_judge(plan, problem):
    assert estimate(PlannedStep.of_program(plan, problem.graph, problem)) == plan.prediction


def test_breakdown_adds_up(plan):
    p = plan.prediction
    assert p.step_time_s == pytest.approx(
        p.compute_s + p.communication_s + p.gradient_s - p.hidden_s, rel=1e-12
    )
    assert 0 <= p.hidden_s <= min(p.gradient_s + p.communication_s, p.compute_s)
    assert sum(p.memory_bytes.values()) == pytest.approx(p.peak_memory_bytes, rel=1e-9)
    assert sum(c.seconds for c in p.collectives) == pytest.approx(
        p.communication_s + p.gradient_s, rel=1e-9, abs=1e-15
    )
    assert p.peak_memory_bytes <= p.memory_limit_bytes


def test_interior_survives_encoding(plan, problem):
    stage, nodes = plan.stages[0], problem.nodes
    assert encode_interior(nodes, decode_interior(stage, nodes), stage.axis_names) == stage.interior


def test_no_method_is_faster_than_the_bound(plan, plans):
    bound = plans("program").provenance.lower_bound_s
    # A mesh of three axes is no part of what `program` looks at.
    if len(plan.stages[0].mesh_shape) < 3:
        assert plan.prediction.step_time_s >= bound * (1 - 1e-9)
    if plan.provenance.lower_bound_s is not None:
        assert plan.prediction.step_time_s >= plan.provenance.lower_bound_s * (1 - 1e-9)
        assert plan.provenance.gap <= 1e-3 * (1 + 1e-9)
        assert plan.provenance.status in ("optimal", "optimal within the gap")


def test_layouts_that_were_given_are_not_called_optimal(plans):
    for name in ("dp", "zero2", "zero3", "manual"):
        found = plans(name).provenance
        assert (found.status, found.lower_bound_s, found.gap) == ("given", None, None)
        (bound,) = (text for title, text in fact_rows(plans(name)) if title == "bound")
        assert bound.startswith("layout given by the method; ")
    assert plans("shard").provenance.status.startswith("optimal")


def test_auto_is_no_slower_than_any_method(plans):
    auto = plans("auto").prediction.step_time_s
    for name in set(ALL_METHODS) - {"shard on 2x2x2"}:
        assert auto <= plans(name).prediction.step_time_s * (1 + 1e-3)


def test_new_state_is_split_like_old_state(plan):
    stage = plan.stages[0]
    for path in (*PARAMETERS, *MOMENTS):
        assert stage.outputs[path.replace("state", "[0]")] == stage.shardings[path]


@pytest.mark.parametrize(
    ("name", "params", "moments"),
    [("dp", 1, 1), ("zero2", 1, 8), ("zero3", 8, 8)],
    ids=["dp", "zero2", "zero3"],
)
def test_zero_stages_split_parameters_and_moments(plans, name, params, moments):
    plan = plans(name)
    assert {shards(plan, path)[0] for path in PARAMETERS} == {params}
    assert {shards(plan, path)[0] for path in MOMENTS} == {moments}
    assert {shards(plan, path)[0] for path in ("batch.x", "batch.y")} == {8}
    parts = plan.prediction.memory_bytes
    whole = 4 * (SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2])
    assert parts["parameters"] == whole / params
    assert parts["optimizer state"] == whole / moments


@pytest.mark.parametrize(
    ("name", "split"),
    [("zero2 within a host", MOMENTS), ("zero3 within a host", PARAMETERS + MOMENTS)],
)
def test_sharding_within_a_host_replicates_across_hosts(plans, name, split):
    plan = plans(name)
    assert plan.stages[0].mesh_shape == (2, 4)
    for path in PARAMETERS + MOMENTS:
        assert shards(plan, path) == ((4, ["y"]) if path in split else (1, []))
    assert shards(plan, "batch.x")[0] == 8


def test_an_odd_parameter_stays_whole():
    plan = aq.plan(*mlp((7, 33, 16), 64), cluster=CLUSTER, method=Zero3Parallel())
    assert shards(plan, "state.params[0]")[0] == 1
    assert shards(plan, "state.params[1]")[0] == 8


def test_manual_follows_patterns(plans):
    plan = plans("manual")
    assert plan.stages[0].shardings["state.params[0]"] == ((), ("y",))
    assert plan.stages[0].shardings["state.params[1]"] == (("y",), ())
    assert plan.stages[0].shardings["batch.x"] == (("x",), ())


@pytest.mark.parametrize(
    ("pattern", "path", "wanted"),
    [
        ("*attn.[qkv].kernel*", "params.layers[3].attn.q.kernel", True),
        ("*attn.[qkv].kernel*", "params.layers[3].attn.out.kernel", False),
        ("params.layers[0].attn.[!o]*", "params.layers[0].attn.q.kernel", True),
        ("params.layers[0].*", "params.layers[1].w", False),
        ("params.layers[*].w", "params.layers[12].w", True),
        ("params.layers[0-3].w", "params.layers[2].w", True),
        ("params.w[0-3]", "params.w2", True),
        ("params['a'].w", "params['a'].w", True),
        ("params[1]", "params1", False),
        ("params[[]1]", "params[1]", True),
    ],
)
def test_patterns_are_those_of_a_shell_and_know_indices(pattern, path, wanted):
    assert _matches(pattern, path) == wanted


def test_manual_takes_named_axes_and_axes_of_size_one():
    specs = {"batch.*": (("data", "model"),)}
    method = ManualParallel(specs=specs, mesh_shape=(8, 1), axis_names=("data", "model"))
    plan = aq.plan(*STEP, cluster=CLUSTER, method=method)
    assert plan.stages[0].shardings["batch.x"] == (("data", "model"), ())
    plan = aq.plan(
        *STEP, cluster=CLUSTER, method=ManualParallel(specs={"batch.x": ("y",)}, mesh_shape=(1, 8))
    )
    assert plan.stages[0].shardings["batch.x"] == (("y",), ())


def test_manual_reports_all_faults_at_once():
    specs = {
        "state.parms*": ("x",),
        "batch.x": ("z",),
        "batch.y": ("x", None, "y"),
        "state.moments*": ("x", "x"),
    }
    with pytest.raises(InputError) as error:
        aq.plan(
            *mlp((6, 9, 6), 6),
            cluster=CLUSTER,
            method=ManualParallel(specs=specs, mesh_shape=(2, 4)),
        )
    text = str(error.value)
    for part in (
        "`state.parms*` matches no input",
        "the axis 'z'",
        "splits 3 dims",
        "'x' twice",
    ):
        assert part in text


def test_manual_names_the_arrays_that_an_input_is_split_with():
    def normed(state, batch):
        return jnp.mean(batch * (jax.lax.rsqrt(state["variance"]) * state["scale"]))

    def planned(**options):
        specs = {"state.scale": ("x",), "state.variance": (None,)}
        method = ManualParallel(specs=specs, mesh_shape=(8,), **options)
        plan = aq.plan(normed, state, batch, cluster=CLUSTER, method=method)
        return plan.stages[0].shardings

    batch, row = jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((32,), "float32")
    state = {"scale": row, "variance": row}
    with pytest.raises(InputError, match=r"variance of shape \(32,\).*unless state.scale is split"):
        planned()
    assert planned(where_possible=True)["state.variance"] == (("x",),)


def test_indivisible_batch():
    for method in (DataParallel(), Zero2Parallel(), Zero3Parallel()):
        for rows in (1, 12):
            with pytest.raises(InputError, match=rf"batch of {rows}.*8 devices.*multiple of 8"):
                aq.plan(*mlp(SIZES, rows), cluster=CLUSTER, method=method)
    # Whoever may split something else still finds a plan.
    assert aq.plan(*mlp(SIZES, 12), cluster=CLUSTER, method=Auto()).prediction.step_time_s > 0


@pytest.mark.parametrize(
    "name", ["dp", "zero3", pytest.param("shard", marks=pytest.mark.slow), "auto", "manual"]
)
def test_infeasible_errors_name_what_would_fit(name):
    # Too little for any plan, though not for an even share of the state, which is refused at once.
    state = Task(graph=aq.capture(*STEP), cluster=CLUSTER).state_bytes
    limit_bytes = int(1.01 * sum(state.values()) / CLUSTER.num_devices)
    with pytest.raises(InfeasibleError) as found:
        aq.plan(*STEP, cluster=CLUSTER, method=ALL_METHODS[name], memory_limit_bytes=limit_bytes)
    error = found.value
    assert error.available_bytes == limit_bytes < error.required_bytes
    assert sum(error.parts.values()) == pytest.approx(error.required_bytes, rel=1e-6)
    assert "2x4xH100" in str(error) and "parameters" in str(error)
    # So little memory that changes by which a plan could fit are few.
    assert error.advice or "neither smaller micro-batches nor 512 such devices fit" in str(error)
    # The smallest found is a plan indeed.
    plan = aq.plan(
        *STEP,
        cluster=CLUSTER,
        method=ALL_METHODS[name],
        memory_limit_bytes=error.required_bytes + 1,
    )
    assert plan.prediction.peak_memory_bytes <= error.required_bytes + 1


@pytest.mark.parametrize("shape", [(3,), (4, 4), (), (0, 8), (-2, -4)])
def test_a_mesh_that_does_not_fit(shape):
    with pytest.raises(InputError, match="2x4xH100 has 8"):
        aq.plan(*STEP, cluster=CLUSTER, method=ShardParallel(mesh_shape=shape))


def test_axis_names_that_do_not_fit():
    with pytest.raises(ClusterError, match="2 axes"):
        aq.plan(
            *STEP,
            cluster=CLUSTER,
            method=ManualParallel(specs={}, mesh_shape=(2, 4), axis_names=("data",)),
        )


def test_unknown_names():
    with pytest.raises(InputError, match="did you mean 'zero3'"):
        method_by_name("zero33")
    with pytest.raises(InputError, match="--mesh"):
        method_by_name("dp", (2, 4))
    with pytest.raises(InputError, match="host"):
        aq.plan(*STEP, cluster=CLUSTER, method=Zero3Parallel(shard_within="rack"))


def test_interrupt_keeps_the_best_so_far():
    calls = []

    def progress(what, done, of):
        calls.append(what)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as found:
        aq.plan(*STEP, cluster=CLUSTER, method=Auto(), progress=progress)
    plan = found.value.plan
    assert plan.provenance.status == "interrupted" and plan.provenance.lower_bound_s is None
    assert len(calls) == 4 and plan.prediction.step_time_s == found.value.decision.step_time_s


def test_interrupt_before_anything_was_found():
    def progress(what, done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as found:
        aq.plan(*STEP, cluster=CLUSTER, method=Auto(), progress=progress)
    assert found.value.decision is None


def test_a_reached_node_limit_is_reported():
    graph = aq.capture(*STEP)
    free = make_problem(graph, CLUSTER)
    best = ShardParallel(mesh_shape=(2, 4)).solve(free)
    tight = make_problem(graph, CLUSTER, memory_limit_bytes=2_000_000)
    method = ShardParallel(mesh_shape=(2, 4), intra=ILP(relative_gap=0.0, node_limit=1))
    decision = method.solve(tight)
    assert decision.lower_bound_s <= decision.step_time_s * (1 + 1e-12)
    assert decision.step_time_s >= best.step_time_s * (1 - 1e-12)
    proved = decision.step_time_s <= decision.lower_bound_s * (1 + 1e-9)
    assert (decision.status == "optimal") == proved


def test_an_interior_of_another_plan_is_refused(plans, problem):
    stage = plans("shard").stages[0]
    wrong = msgspec.structs.replace(
        stage.interior[0], node="another", splits={stage.axis_names[0]: "nowhere"}
    )
    short = msgspec.structs.replace(stage, interior=(wrong, *stage.interior[1:-1]))
    with pytest.raises(PlanMismatchError) as found:
        decode_interior(short, problem.nodes)
    assert len(found.value.violations) == 2
    unknown = msgspec.structs.replace(stage.interior[0], splits={stage.axis_names[0]: "nowhere"})
    with pytest.raises(PlanMismatchError, match="nowhere"):
        decode_interior(
            msgspec.structs.replace(stage, interior=(unknown, *stage.interior[1:])), problem.nodes
        )


def test_micro_batches_pay_the_update_once(problem):
    """Twice the micro-batches of one size: forward and backward double, the update and its
    gradients do not.
    """
    mesh = LogicalMesh(shape=(8,), cluster=CLUSTER)
    use = MeshUse(mesh=mesh, data_axes=frozenset({0}))
    once, twice = (price(problem, use, repeats=m) for m in (1, 2))
    kinds = {}
    for node, node_work, a, b in zip(problem.nodes.nodes, problem.work, once.nodes, twice.nodes):
        for work in node_work:
            kinds.setdefault(node.index, set()).add(work.phase.name)
        if kinds.get(node.index) == {"UPDATE"}:
            assert (a.compute_s == b.compute_s).all()
        elif kinds.get(node.index) and "UPDATE" not in kinds[node.index]:
            assert b.compute_s == pytest.approx(2 * a.compute_s)


@pytest.mark.parametrize("method", [Zero2Parallel(), Zero3Parallel()])
def test_gradients_are_reduced_after_the_last_micro_batch_if_they_fit(method):
    """Whole gradients are synchronised once; under a limit that they exceed, each micro-batch adds
    to its shards.
    """
    # Of weights so large that their synchronisation takes a good part of the step.
    step = mlp((1024, 4096, 1024), 64)
    free = aq.plan(*step, cluster=CLUSTER, method=method, num_micro_batches=2)
    assert free.stages[0].data_axes == free.stages[0].axis_names
    plan = free
    # Until nothing fits, which is an error.
    while plan.stages[0].data_axes:
        limit = 0.98 * plan.prediction.peak_memory_bytes
        plan = aq.plan(
            *step, cluster=CLUSTER, method=method, num_micro_batches=2, memory_limit_bytes=limit
        )
    assert plan.prediction.peak_memory_bytes < free.prediction.peak_memory_bytes
    assert plan.prediction.step_time_s >= free.prediction.step_time_s


@pytest.mark.parametrize("name", ["dp", "zero2", "zero3", "megatron:dp1"])
def test_one_device_takes_a_batch_of_one(name):
    method, cluster = method_by_name(name), Cluster.preset("1xH100")
    assert not aq.plan(*mlp(SIZES, 1), cluster=cluster, method=method).prediction.collectives
