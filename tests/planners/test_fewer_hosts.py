"""Plans that leave hosts idle, where the step is faster on fewer: the relation that more hosts are
never slower, what plans say, and runs.
"""

import functools
from types import SimpleNamespace

import jax
import msgspec
import numpy as np
import pytest
from planners.small_steps import mlp

import aliquot as aq
from aliquot.core import PlanFileError, PlanMismatchError
from aliquot.planners import Auto, Interrupted, PipeshardParallel
from aliquot.planners._search import Hosts, fewer_hosts
from aliquot.plans import Plan, diff, mfu, require_busy_processes, violations
from aliquot.report import explained, explanation

SMALL = mlp((1024, 1024, 1024, 1024), 256)
LARGE = mlp((4096, 4096, 4096), 8192)
STEPS = {"small": SMALL, "large": LARGE}
# Leaving hosts idle is worth no less.
LEAST_GAIN = 1e-3


def planned(step, num_hosts, method=None, **options):
    cluster = aq.Cluster.preset(f"{num_hosts}x4xH100")
    return aq.plan(*step, cluster=cluster, method=method or Auto(), **options)


@functools.cache
def known_plan(size, num_hosts, method):
    """The plan of a step of `STEPS`, which several tests look at."""
    return planned(STEPS[size], num_hosts, method)


@pytest.fixture(scope="module")
def idle_plan():
    """A plan for two hosts of four devices that leaves one idle."""
    return known_plan("small", 2, Auto())


@pytest.mark.parametrize(
    ("size", "method"),
    [
        pytest.param("small", PipeshardParallel(num_micro_batches=4), id="small-pipeshard"),
        pytest.param("large", Auto(), id="large-auto"),
        pytest.param("small", Auto(), id="small-auto", marks=pytest.mark.slow),
        pytest.param("large", PipeshardParallel(), id="large-pipeshard", marks=pytest.mark.slow),
    ],
)
def test_more_hosts_are_no_slower(size, method):
    plans = {hosts: known_plan(size, hosts, method) for hosts in (1, 2, 4)}
    times = [plan.prediction.step_time_s for plan in plans.values()]
    assert times[1] <= times[0] * (1 + LEAST_GAIN) and times[2] <= times[1] * (1 + LEAST_GAIN)
    idle = {hosts: plan.idle_hosts for hosts, plan in plans.items()}
    assert idle == ({1: 0, 2: 1, 4: 3} if size == "small" else {1: 0, 2: 0, 4: 0})
    if size == "large":
        # Further hosts are worth it.
        assert times[2] < 0.9 * times[1] < 0.81 * times[0]


def test_three_hosts_are_no_slower_than_two():
    # Three do not divide the batch.
    step = mlp((2048, 2048, 2048), 64)
    two, three = (
        planned(step, hosts, num_micro_batches=1).prediction.step_time_s for hosts in (2, 3)
    )
    assert three <= two * (1 + LEAST_GAIN)


def test_numbers_of_hosts_that_are_tried_are_those_of_half_as_many_and_half_itself():
    assert fewer_hosts(1) == [] and fewer_hosts(2) == [1] and fewer_hosts(3) == [2, 1]
    assert fewer_hosts(8) == [4, 2, 1] and fewer_hosts(6) == [4, 3, 2, 1]
    for total in range(1, 100):
        assert {total, *fewer_hosts(total)} <= set(fewer_hosts(2 * total))


def test_a_given_mesh_and_methods_without_a_search_use_all_hosts():
    mesh = (2, 4)
    for method in (Auto(mesh_shape=mesh), aq.WholeProgram(mesh_shape=mesh), aq.DataParallel()):
        plan = planned(SMALL, 2, method)
        assert plan.idle_hosts == 0 and plan.cluster["num_hosts"] == 2


def test_the_time_on_all_hosts_is_known_and_larger(idle_plan):
    assert idle_plan.cluster["num_hosts"] == 1 and idle_plan.idle_hosts == 1
    alone = known_plan("small", 1, Auto())
    assert idle_plan.prediction == alone.prediction and idle_plan.stages == alone.stages
    (on_all,) = [
        c["step_time_s"] for c in idle_plan.provenance.candidates if c["name"] == "auto on 2 hosts"
    ]
    assert on_all > idle_plan.prediction.step_time_s * (1 + LEAST_GAIN)
    assert aq.estimate(idle_plan, *SMALL).step_time_s == idle_plan.prediction.step_time_s


def test_one_program_is_as_fast_as_one_stage_on_fewer_hosts():
    step, cluster = mlp((512, 2048, 512, 2048, 512), 256), aq.Cluster.preset("2x8xV100-16GB")
    program = aq.plan(*step, cluster=cluster, method=aq.WholeProgram())
    one_stage = PipeshardParallel(num_stages=1)
    stage = aq.plan(*step, cluster=cluster, method=one_stage, num_micro_batches=1)
    assert program.idle_hosts == stage.idle_hosts == 1
    assert program.prediction.step_time_s == stage.prediction.step_time_s
    assert "one-program plans, 1 micro-batch on 1 host" in " ".join(str(program).split())


def test_plans_say_which_hosts_are_idle_and_why(idle_plan):
    note = idle_plan.notes[0]
    assert note.startswith("1 host, 4 devices, is idle: the step is faster on 1 host, ")
    assert note.endswith(" on all 2. MFU counts all 8 devices.") and "% less than the " in note
    text = str(idle_plan)
    assert note in text and "on 1 of the 2 hosts of 2x4xH100" in text.splitlines()[0]
    assert "the last 1 host, 4 devices: faster without" in text
    assert explained(idle_plan)["idle_hosts"] == 1
    assert "is idle" in str(planned(SMALL, 2, num_micro_batches=1)) and explanation(idle_plan)
    many = known_plan("small", 4, Auto())
    assert many.notes[0].startswith("3 hosts, 12 devices, are idle: the step is faster on 1 host")
    assert "idle" not in str(known_plan("large", 2, Auto()))


def test_utilization_counts_idle_devices(idle_plan):
    counted = msgspec.structs.replace(idle_plan.model, flops_per_step=1e9)
    with_idle = msgspec.structs.replace(idle_plan, model=counted)
    without = msgspec.structs.replace(with_idle, idle_hosts=0)
    assert mfu(without) == pytest.approx(2 * mfu(with_idle)) and mfu(with_idle) > 0


def test_plan_files_keep_idle_hosts_and_older_ones_have_none(idle_plan, tmp_path):
    idle_plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == idle_plan and loaded.to_json() == idle_plan.to_json()
    data = msgspec.json.decode(idle_plan.to_json())
    del data["idle_hosts"]
    older = Plan.from_json(msgspec.json.encode(data).decode())
    assert older.idle_hosts == 0 and older != idle_plan and "idle_hosts" not in older.to_json()
    assert any(change.subject == "idle_hosts" for change in diff(older, idle_plan).changes)
    with pytest.raises(PlanFileError, match="-1 idle hosts"):
        Plan.from_json(msgspec.json.encode({**data, "idle_hosts": -1}).decode())


def test_a_plan_takes_the_devices_with_the_idle_ones_or_without(idle_plan):
    assert violations(idle_plan, num_devices=4) == violations(idle_plan, num_devices=8) == []
    (fault,) = violations(idle_plan, num_devices=6)
    assert "the plan is for 4 devices" in fault and "there are 6" in fault


def numbers(step_function, state, batch):
    """State and batch of random numbers."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (random.normal(size=x.shape) / 32).astype(x.dtype), (state, batch)
    )


@pytest.mark.parametrize("is_pipeline", [True, False], ids=["pipeline", "one program"])
def test_a_run_that_leaves_devices_idle_has_the_numbers_of_the_plain_step(idle_plan, is_pipeline):
    plan = idle_plan
    if not is_pipeline:
        plan = msgspec.structs.replace(planned(SMALL, 1, aq.ShardParallel()), idle_hosts=1)
    assert plan.is_pipeline == is_pipeline and jax.device_count() == 8
    state, batch = numbers(*SMALL)
    step = aq.parallelize(SMALL[0], plan)
    assert step.check(state, batch).largest < 1e-5
    placed, rest = step.place(state, batch)
    new, _ = step(placed, rest)
    used = {d for leaf in jax.tree.leaves(new) for d in leaf.sharding.device_set}
    assert used == {d for mesh in step.meshes for d in mesh.devices.flat} <= set(jax.devices()[:4])


def processes(*numbers):
    return [SimpleNamespace(process_index=k) for k in numbers]


def test_processes_of_idle_hosts_alone_are_refused_with_advice(idle_plan):
    for fine in ([0] * 8, [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]):
        require_busy_processes(idle_plan, processes(*fine))
    with pytest.raises(PlanMismatchError) as refused:
        require_busy_processes(idle_plan, processes(0, 0, 1, 1, 2, 2, 3, 3))
    assert "leaves 1 host of 2 idle" in str(refused.value)
    assert "processes 2, 3 of 4 would have nothing to do" in str(refused.value)
    assert "Start processes on the first host only" in str(refused.value)


def test_ctrl_c_while_fewer_hosts_are_searched_keeps_the_best_plan():
    told = []

    def progress(what, done, of):
        told.append(what)
        if stops_at and len(told) == stops_at:
            raise KeyboardInterrupt

    stops_at = 0
    on_all = planned(SMALL, 2, progress=progress, num_micro_batches=2)
    # Far behind the search on both hosts.
    stops_at, told[:] = len(told) - 1, []
    with pytest.raises(Interrupted) as stopped:
        planned(SMALL, 2, progress=progress, num_micro_batches=2)
    best = stopped.value.plan
    assert best is not None and on_all.idle_hosts == 1
    assert best.prediction.step_time_s >= on_all.prediction.step_time_s
    assert violations(best) == []


@pytest.mark.parametrize("method", [Auto(), PipeshardParallel()], ids=["auto", "pipeshard"])
def test_fewer_hosts_are_not_searched_where_they_compute_too_long(method, monkeypatch):
    searched = []
    open_hosts = Hosts.open

    def opened(hosts, search):
        searched.append(hosts.task.cluster.num_hosts)
        return open_hosts(hosts, search)

    monkeypatch.setattr(Hosts, "open", opened)
    # With one host of two, computing alone takes longer than the step on both.
    large = mlp((8192, 8192, 8192), 65536)
    assert planned(large, 2, method).idle_hosts == 0 and 1 not in searched
    assert planned(SMALL, 2, method, num_micro_batches=2).idle_hosts == 1 and 1 in searched
