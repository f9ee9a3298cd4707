"""Answers where a step does not fit: advice that was tried, and numbers of micro-batches
searched.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from command_line import run
from planners.small_steps import mlp

import aliquot as aq
from aliquot._remedies import Remedy, coarser, remedies_text
from aliquot.cli._remedies import with_remedies
from aliquot.cluster import Cluster
from aliquot.core import InfeasibleError, TimeLimitError
from aliquot.planners import (
    Auto,
    DataParallel,
    Megatron,
    PipeshardParallel,
    Task,
    WholeProgram,
    method_by_name,
    simple_plan,
)
from aliquot.sharding.micro_batches import _micro_batches

CLUSTER = Cluster.preset("1x4xH100")
# Activations weigh more than parameters, so that micro-batches help.
STEP = mlp((64, 128, 64), 4096)
# Enough for an even share of the state, 32 KiB, but not for any plan.
MORE_THAN_STATE = 40_000
STATE_BYTES = sum(4 * leaf.size for leaf in jax.tree.leaves(STEP[1]))


@pytest.fixture(scope="module")
def tight():
    """A limit between what one micro-batch needs and what four need."""
    needs = [
        aq.plan(
            *STEP, cluster=CLUSTER, method=DataParallel(), num_micro_batches=count
        ).prediction.peak_memory_bytes
        for count in (1, 4)
    ]
    assert needs[1] < 0.8 * needs[0]
    return (needs[0] + needs[1]) / 2


def test_every_advice_is_true_when_taken(tight):
    remedies = aq.find_remedies(
        *STEP,
        cluster=CLUSTER,
        method=DataParallel(),
        memory_limit_bytes=tight,
        num_micro_batches=1,
    )
    fitting = [each for each in remedies if each.plan is not None]
    assert {each.change.split()[0] for each in fitting} >= {"--micro-batches", "--cluster"}
    for each in fitting:
        assert each.plan.prediction.peak_memory_bytes <= tight
    taken = next(each for each in fitting if each.change.startswith("--micro-batches"))
    again = aq.plan(
        *STEP,
        cluster=CLUSTER,
        method=DataParallel(),
        memory_limit_bytes=tight,
        num_micro_batches=int(taken.change.split()[1]),
    )
    assert again.prediction.step_time_s == taken.plan.prediction.step_time_s
    larger = next(each for each in fitting if each.change.startswith("--cluster"))
    other = Cluster.preset(larger.change.split()[1])
    assert (
        aq.plan(
            *STEP, cluster=other, method=DataParallel(), memory_limit_bytes=tight
        ).prediction.step_time_s
        > 0
    )


def test_what_was_tried_in_vain_says_what_it_needs(tight):
    remedies = aq.find_remedies(
        *STEP, cluster=CLUSTER, method=DataParallel(), memory_limit_bytes=tight / 1000
    )
    assert remedies and all(
        each.plan is None and each.required_bytes > tight / 1000 for each in remedies
    )


def test_where_the_state_alone_is_too_large_only_as_many_hosts_as_hold_it_are_tried():
    """Smaller batches and other methods would be tried in vain, as the state does not shrink."""
    remedies = aq.find_remedies(
        *STEP, cluster=CLUSTER, method=DataParallel(), memory_limit_bytes=STATE_BYTES / 12
    )
    assert remedies[0].change == "--cluster 4x4xH100"
    assert all(each.change.startswith("--cluster") for each in remedies)


def test_a_refusal_of_auto_speaks_of_the_cluster_and_of_all_that_was_searched():
    with pytest.raises(InfeasibleError) as refused:
        aq.plan(*STEP, cluster=CLUSTER, memory_limit_bytes=MORE_THAN_STATE)
    assert str(refused.value).startswith(
        f"No plan fits {CLUSTER.name} (39.1 KiB usable on each device), neither with a pipeline nor"
    )


def test_a_layout_is_advised_to_split_a_state_that_no_smaller_batch_makes_smaller():
    # Few examples, so that nearly all of the memory is state.
    step, asked = mlp((256, 512, 256), 8), {"cluster": CLUSTER, "memory_limit_bytes": 1.9 * 2**20}
    layout = Megatron(data=4)
    refused = refusal(step, method=layout, memory_limit_bytes=asked["memory_limit_bytes"])
    remedies = aq.find_remedies(*step, method=layout, refused=refused, **asked)
    changes = [each.change for each in remedies]
    assert not any(change.startswith("--micro-batches") for change in changes)
    taken = next(each for each in remedies if each.plan is not None)
    assert taken.change.startswith("--method megatron:dp4,")
    method = method_by_name(taken.change.split()[1])
    again = aq.plan(*step, method=method, **asked)
    assert again.prediction.step_time_s == taken.plan.prediction.step_time_s
    # Where the batch is what is too large, a smaller one helps.
    assert "--micro-batches 2" in [
        each.change for each in aq.find_remedies(*step, method=layout, **asked)
    ]


def test_micro_batches_that_do_not_divide_the_batch_are_not_advised():
    # Six examples on each device, whose parameters are too large in any number of parts.
    remedies = aq.find_remedies(
        *mlp((64, 128, 64), 24),
        cluster=CLUSTER,
        method=DataParallel(),
        memory_limit_bytes=STATE_BYTES / 3.9,
        num_micro_batches=1,
    )
    counts = [
        int(each.change.split()[1])
        for each in remedies
        if each.change.startswith("--micro-batches")
    ]
    assert counts == [2]
    assert "--method auto" in [each.change for each in remedies]


def test_a_spent_budget_begins_nothing(tight):
    assert (
        aq.find_remedies(*STEP, cluster=CLUSTER, memory_limit_bytes=tight / 1000, budget_s=-1.0)
        == ()
    )


def test_a_change_that_is_not_planned_within_the_time_is_said_to_be_unknown(tight, monkeypatch):
    def endless(*args, time_limit_s, **kwargs):
        assert 0 < time_limit_s <= 7.0
        raise TimeLimitError("no plan was complete")

    monkeypatch.setattr("aliquot._remedies.plan_variants", endless)
    (remedy,) = aq.find_remedies(
        *STEP, cluster=CLUSTER, memory_limit_bytes=tight / 1000, budget_s=7.0
    )
    assert remedy.plan is None and not remedy.is_known and remedy.to_dict()["fits"] is None
    assert remedies_text([remedy]) == (
        f"Not tried to the end for lack of time, and may fit:\n  {remedy.change}"
    )


def test_what_was_not_tried_to_the_end_is_a_whole_command(monkeypatch):
    typed = ["aliquot", "plan", "my model", "--method", "dp", "--mesh=4", "--micro-batches", "2"]
    monkeypatch.setattr("sys.argv", typed)
    found = with_remedies(
        InfeasibleError("no plan"),
        [
            Remedy(change="--method auto without --mesh", plan=None, is_known=False),
            Remedy(change="4 hosts of the same kind", plan=None, is_known=False),
            Remedy(
                change="--method zero2",
                plan=None,
                required_bytes=2**30,
                found_with="8 micro-batches, --recompute block",
            ),
        ],
    )
    assert found.message.splitlines() == [
        "no plan",
        "Tried, and does not fit:",
        "  --method zero2  needs 1.0 GiB at least: 8 micro-batches, --recompute block",
        "Not tried to the end for lack of time, and may fit:",
        "  aliquot plan 'my model' --micro-batches 2 --method auto",
        "  4 hosts of the same kind",
    ]


def test_a_refusal_says_with_what_the_smallest_plan_was_found():
    with pytest.raises(InfeasibleError) as refused:
        aq.plan(
            *STEP,
            cluster=CLUSTER,
            method=DataParallel(),
            num_micro_batches=2,
            memory_limit_bytes=STATE_BYTES / 2,
        )
    assert refused.value.found_with[0] == "2 micro-batches"


def test_more_hosts_are_not_tried_for_a_state_that_each_device_holds_whole(monkeypatch):
    def planned(*args, **kwargs):
        raise InfeasibleError("nothing fits", required_bytes=1e12)

    monkeypatch.setattr("aliquot._remedies.plan_variants", planned)
    for limit_bytes, are_tried in ((STATE_BYTES / 2, False), (STATE_BYTES * 2, True)):
        tried = aq.find_remedies(
            *STEP,
            cluster=CLUSTER,
            method=DataParallel(),
            memory_limit_bytes=limit_bytes,
            refused=InfeasibleError("no", parts={"parameters": STATE_BYTES}),
        )
        assert any("--cluster" in each.change for each in tried) == are_tried


def test_changes_that_no_time_was_left_for_are_named(tight, monkeypatch):
    """The quick ones come first, so that it is the long search which has no answer."""

    def planned(*args, cluster, method, **kwargs):
        if isinstance(method, Auto):
            raise TimeLimitError("no plan was complete")
        raise InfeasibleError("nothing fits", required_bytes=1e12)

    monkeypatch.setattr("aliquot._remedies.plan_variants", planned)
    options = {"cluster": CLUSTER, "method": DataParallel(), "memory_limit_bytes": tight}
    options["num_micro_batches"] = 1
    tried = aq.find_remedies(*STEP, **options)
    assert [each.change for each in tried if not each.is_known] == ["--method auto"]
    assert "--cluster 2x4xH100" in [each.change for each in tried if each.is_known]

    def endless(*args, num_micro_batches, **kwargs):
        raise TimeLimitError("no plan was complete")

    monkeypatch.setattr("aliquot._remedies.plan_variants", endless)
    untried = aq.find_remedies(*STEP, **options)
    assert [each.change for each in untried] == [
        "--micro-batches 2",
        "--method zero2",
        "--cluster 2x4xH100",
        "--method auto",
    ]
    assert not any(each.is_known for each in untried)


@pytest.mark.parametrize("method", [None, Auto(), PipeshardParallel(), WholeProgram()])
def test_remedies_are_searched_with_a_gap(method):
    assert coarser(method).intra.relative_gap == 0.02
    assert coarser(DataParallel()) == DataParallel()


def test_auto_micro_batches_are_the_fastest_that_fit(tight):
    found = aq.plan(
        *STEP,
        cluster=CLUSTER,
        method=DataParallel(),
        memory_limit_bytes=tight,
        num_micro_batches="auto",
    )
    times = {}
    for count in (1, 2, 4, 8, 16):
        try:
            made = aq.plan(
                *STEP,
                cluster=CLUSTER,
                method=DataParallel(),
                memory_limit_bytes=tight,
                num_micro_batches=count,
            )
        except InfeasibleError:
            continue
        times[count] = made.prediction.step_time_s
    assert 1 not in times and found.num_micro_batches == min(times, key=times.get)


def test_auto_micro_batches_without_need_are_one():
    assert (
        aq.plan(*STEP, cluster=CLUSTER, method=Auto(), num_micro_batches="auto").num_micro_batches
        == 1
    )


def test_auto_micro_batches_say_what_one_needs_where_nothing_fits():
    with pytest.raises(InfeasibleError, match="No plan of method"):
        aq.plan(
            *STEP,
            cluster=CLUSTER,
            method=WholeProgram(),
            memory_limit_bytes=MORE_THAN_STATE,
            num_micro_batches="auto",
        )


def test_auto_says_the_smallest_need_of_all_that_it_searched():
    def need(method):
        with pytest.raises(InfeasibleError) as refused:
            aq.plan(*STEP, cluster=CLUSTER, method=method, memory_limit_bytes=MORE_THAN_STATE)
        return refused.value.required_bytes

    assert need(Auto()) == min(need(WholeProgram()), need(PipeshardParallel()))


def test_another_method_is_advised_without_the_options_that_it_refuses():
    remedies = aq.find_remedies(
        *STEP,
        cluster=CLUSTER,
        method=PipeshardParallel(num_stages=2, schedule="1f1b"),
        memory_limit_bytes=STATE_BYTES / 3.9,
    )
    change = "--method auto without --stages and --schedule"
    assert change in [each.change for each in remedies]


@pytest.mark.slow
def test_the_command_prints_what_was_tried_with_step_times(tight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_remedies.py").write_text(
        "from planners.small_steps import mlp\n\n"
        "def factory():\n    return mlp((64, 128, 64), 4096)\n"
    )
    given = ("plan", "own_remedies:factory", "--cluster", "1x4xH100", "--method", "dp")
    given = (*given, "--micro-batches", "1")
    given = (*given, "--memory-limit", f"{tight / 1024:.0f}KiB")
    found = run(*given)
    assert found.exit_code == 1 and "It could fit" not in found.stderr
    assert "Tried, and" in found.stderr
    answer = json.loads(run(*given, "--json").stdout)
    assert answer["feasible"] is False and answer["remedies"]
    for each in answer["remedies"]:
        assert (each["fits"] is True) == (each["step_time_s"] is not None)
    quick = run(*given, "--no-remedies")
    assert "Tried" not in quick.stderr and "It could fit with" in quick.stderr


def refusal(step, **asked):
    with pytest.raises(InfeasibleError) as refused:
        aq.plan(*step, cluster=CLUSTER, **asked)
    return refused.value


def test_micro_batches_that_an_error_advises_fit(tight):
    one = {"method": DataParallel(), "memory_limit_bytes": tight, "num_micro_batches": 1}
    error = refusal(STEP, **one)
    (count,) = (int(each.split()[0]) for each in error.advice if "micro-batches" in each)
    assert count > 1 and "(now 1)" in str(error)
    for more in (count, 2 * count):
        aq.plan(*STEP, cluster=CLUSTER, **one | {"num_micro_batches": more})


def test_advised_micro_batches_divide_the_batch_and_the_devices_divide_each():
    """Of 4 x 3 x 3 x 5 rows on 4 devices 2 micro-batches leave 90, which 4 do not divide."""
    step = mlp((64, 128, 64), 180)
    one = {"method": DataParallel(), "num_micro_batches": 1}
    needs = [
        aq.plan(*step, cluster=CLUSTER, **one | {"num_micro_batches": n}).prediction for n in (1, 3)
    ]
    one["memory_limit_bytes"] = sum(each.peak_memory_bytes for each in needs) / 2
    advice = refusal(step, **one).advice
    (count,) = (int(each.split()[0]) for each in advice if "micro-batches" in each)
    assert count in (3, 5)
    aq.plan(*step, cluster=CLUSTER, **one | {"num_micro_batches": count})


def test_devices_that_an_error_advises_fit():
    asked = {"method": aq.Zero3Parallel(), "memory_limit_bytes": 4 * STATE_BYTES}
    asked["num_micro_batches"] = 1
    error = refusal(STEP, **asked)
    (devices,) = (int(each.split()[0]) for each in error.advice if "such devices" in each)
    aq.plan(*STEP, cluster=Cluster.preset(f"1x{devices}xH100"), **asked)


def test_what_is_gathered_whole_is_not_said_to_shrink():
    """A table that ZeRO-3 gathers: no more micro-batches and no more devices make it smaller."""

    def step(state, batch):
        def loss(table):
            return jnp.mean(table[batch] ** 2)

        return state - jax.grad(loss)(state), loss(state)

    table = jax.ShapeDtypeStruct((1 << 20, 64), "float32")
    error = refusal(
        (step, table, jax.ShapeDtypeStruct((4096,), "int32")),
        method=aq.Zero3Parallel(),
        memory_limit_bytes=220 * 2**20,
    )
    assert "256.0 MiB are whole on each device at once" in str(error)
    assert error.advice == ("method shard or auto, which leave every split open",)


def test_a_larger_cluster_is_named_only_where_that_is_this_cluster(tight):
    inter = dataclasses.replace(CLUSTER.inter, bandwidth_bytes_per_s=1e9)
    slow = dataclasses.replace(CLUSTER, inter=inter)
    for cluster, change in (
        (CLUSTER, "--cluster 2x4xH100"),
        (slow, "2 hosts of the same kind and network"),
    ):
        remedies = aq.find_remedies(
            *STEP, cluster=cluster, method=DataParallel(), memory_limit_bytes=tight
        )
        assert change in [each.change for each in remedies]


def test_method_auto_is_advised_without_a_mesh():
    remedies = aq.find_remedies(
        *STEP, cluster=CLUSTER, method=Auto(mesh_shape=(4,)), memory_limit_bytes=STATE_BYTES / 3.9
    )
    assert "--method auto without --mesh" in [each.change for each in remedies]


def test_a_step_that_does_not_decompose_has_remedies_without_micro_batches():
    def step(state, batch):
        def loss(w):
            z = jnp.tanh(batch @ w)
            return jnp.mean((z / z.std(axis=0)) ** 4)

        return state - jax.grad(loss)(state), loss(state)

    shape = jax.ShapeDtypeStruct
    args = (step, shape((64, 128), "float32"), shape((4096, 64), "float32"))
    error = refusal(args, method=DataParallel(), memory_limit_bytes=1.3e6)
    assert "does not decompose into micro-batches" in str(error)
    assert not [each for each in error.advice if "micro-batches" in each]
    remedies = aq.find_remedies(
        *args, cluster=CLUSTER, method=DataParallel(), memory_limit_bytes=1.3e6
    )
    assert remedies
    assert not [each for each in remedies if each.change.startswith("--micro-batches")]


def test_independent_micro_batches_are_tried_where_the_step_does_not_decompose(monkeypatch):
    def step(params, x):
        def loss(params):
            hidden = jnp.tanh(x @ params["first"])
            # As batch normalisation: examples need sums over the batch.
            hidden = (hidden - hidden.mean(0)) / (hidden.var(0) + 1e-3)
            return jnp.mean((hidden @ params["second"]) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"first": jnp.ones((16, 64)), "second": jnp.ones((64, 16))}
    x = jnp.ones((4096, 16))
    needed = aq.plan(step, params, x, cluster=CLUSTER, method=DataParallel())
    limit = 0.7 * needed.prediction.peak_memory_bytes
    with pytest.raises(InfeasibleError):
        aq.plan(step, params, x, cluster=CLUSTER, memory_limit_bytes=limit)
    remedies = aq.find_remedies(step, params, x, cluster=CLUSTER, memory_limit_bytes=limit)
    found = {each.change: each.plan for each in remedies}
    # A simple plan asks whether the step decomposes, and writes no text that nobody reads.
    monkeypatch.setattr(_micro_batches, "_refusal", lambda *args: pytest.fail("a refusal"))
    task = Task(graph=aq.capture(step, params, x), cluster=CLUSTER, memory_limit_bytes=limit)
    assert simple_plan(task) is None
    plan = found["--micro-batch-semantics independent"]
    assert plan is not None and plan.num_micro_batches > 1
    assert plan.prediction.peak_memory_bytes <= limit
