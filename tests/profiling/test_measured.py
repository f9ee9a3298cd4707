"""Plans priced from measured operators: the judge, the planners, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from two_products import STEP

import aliquot as aq
from aliquot.cluster import MEASURED_COMPUTE, Cluster, LogicalMesh, logical_mesh_shapes, target_for
from aliquot.core import InputError
from aliquot.cost import RatioTable, make_problem, price
from aliquot.graph import capture
from aliquot.profiling import (
    LAUNCH,
    Measurement,
    Operator,
    ProfileDatabase,
    ProgramKey,
    alone_on_one_device,
    fit_profiles,
    read_measured,
    required_operators,
    to_toml,
)
from aliquot.profiling._measured import modelled_operator
from aliquot.profiling._programs import host_device

CLUSTER = Cluster.preset("4xH100")
H100 = "NVIDIA H100 80GB HBM3"
LAUNCH_S = 1e-9
LARGE = (
    STEP[0],
    {
        k: jax.ShapeDtypeStruct(s, "float32")
        for k, s in (("up", (2048, 8192)), ("down", (8192, 2048)))
    },
    jax.ShapeDtypeStruct((4096, 2048), "float32"),
)


def measured_as(path, of_model, *, device=H100, version=None, of=CLUSTER, spread=0.02, step=STEP):
    """A database of all that a step needs, in which everything takes `of_model(operator, modelled
    seconds)`.
    """
    problem = make_problem(capture(*step), CLUSTER)
    with ProfileDatabase(path) as database:
        for operator, shape in required_operators(problem, logical_mesh_shapes(4)):
            key = ProgramKey(
                program=str(operator),
                device=device,
                num_devices=4,
                mesh="x".join(map(str, shape if operator.axes else (4,))),
                jax_version=version or jax.__version__,
            )
            if operator.kind in ("launch", "transfer"):
                seconds = LAUNCH_S if operator == LAUNCH else 1e-3 + operator.sizes[0] / 2 / 1e9
            else:
                seconds = of_model(operator, modelled_operator(operator, key, of)[2]) + LAUNCH_S
            database.put(key, Measurement(seconds=seconds, spread=spread, repeats=5))
    return path


@pytest.mark.parametrize("points", [1, 2, 7])
def test_a_table_goes_through_its_points(points):
    sizes = np.arange(points, dtype=float)[:, None] * 2
    table = RatioTable(points=sizes, ratios=2.0 ** np.arange(points), spreads=np.full(points, 0.1))
    found = table.correct(sizes)
    np.testing.assert_allclose(found.ratios, table.ratios, rtol=1e-12)
    assert found.is_measured.all() and (found.errors == 0.1).all()
    assert (table.interpolation_error == 1.0) == (points == 1)


def test_between_and_beyond_points_a_table_stays_between_its_ratios():
    table = RatioTable(
        points=np.array([[0.0], [4.0]]), ratios=np.array([1.0, 4.0]), spreads=np.zeros(2)
    )
    found = table.correct(np.array([[2.0], [0.5], [100.0]]))
    assert (
        found.ratios[0] == pytest.approx(2.0)
        and 1 < found.ratios[1] < 1.2
        and 1 < found.ratios[2] <= 4
    )
    assert found.is_measured.tolist() == [False, True, False]
    assert (
        found.errors == table.interpolation_error
    ).all() and table.interpolation_error == pytest.approx(3.0, rel=2)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize(
    "method", [aq.DataParallel(), aq.Zero3Parallel(), aq.ShardParallel(mesh_shape=(2, 2))]
)
def test_a_step_of_which_everything_takes_twice_as_long_takes_twice_as_long(
    tmp_path, method, factor
):
    profiles = measured_as(tmp_path / "p.sqlite", lambda operator, seconds: factor * seconds)
    plan = aq.plan(*STEP, cluster=CLUSTER, method=method)
    found = aq.estimate(plan, *STEP, profiles=profiles)
    for name in ("compute_s", "communication_s", "gradient_s", "hidden_s", "step_time_s"):
        assert getattr(found, name) == pytest.approx(
            factor * getattr(plan.prediction, name), rel=1e-6
        ), name
    assert found.peak_memory_bytes == plan.prediction.peak_memory_bytes
    assert found.measured_share == pytest.approx(1.0) and 0.0 <= found.measured_error <= 0.03
    assert plan.prediction.measured_share == plan.prediction.measured_error == 0.0


def test_measured_sizes_have_measured_prices(tmp_path):
    rng = np.random.default_rng(0)
    ratios = {}

    def scattered(operator, seconds):
        ratios[operator] = rng.uniform(0.2, 5.0)
        return ratios[operator] * seconds

    with ProfileDatabase(measured_as(tmp_path / "p.sqlite", scattered)) as database:
        measured = read_measured(database, CLUSTER)
    problem = make_problem(capture(*STEP), CLUSTER)
    modelled, corrected = (
        price(problem, LogicalMesh(shape=(4,), cluster=cluster))
        for cluster in (CLUSTER, replace(CLUSTER, measured=measured))
    )
    seen = 0
    for node_work, before, after in zip(problem.work, modelled.nodes, corrected.nodes, strict=True):
        works = [work for work in node_work if work.flops]
        if len(works) == 1 and len(node_work) == 1 and works[0].kernels == 1:
            found = after.compute_s / before.compute_s
            products = {o: r for o, r in ratios.items() if o.kind == "product"}
            for value in found:
                assert min(abs(value / ratio - 1) for ratio in products.values()) < 1e-9
                seen += 1
    assert seen >= 8


def test_planners_avoid_what_was_measured_to_be_slow(tmp_path):
    plain = aq.plan(*LARGE, cluster=CLUSTER)
    kind = max(plain.prediction.collectives, key=lambda use: use.num_bytes).kind

    def slow_collectives(operator, seconds):
        return seconds * (1e4 if operator.kind == kind and operator.sizes[0] > 1024 else 1.0)

    profiles = measured_as(tmp_path / "p.sqlite", slow_collectives, step=LARGE)
    found = aq.plan(*LARGE, cluster=CLUSTER, profiles=profiles)

    def moved_bytes(plan):
        return sum(use.num_bytes for use in plan.prediction.collectives if use.kind == kind)

    assert moved_bytes(plain) > 10_000 > moved_bytes(found)
    assert (
        found.prediction.step_time_s
        < 0.1 * aq.estimate(plain, *LARGE, profiles=profiles).step_time_s
    )


@pytest.mark.parametrize(
    "method", [aq.Auto(), aq.PipeshardParallel(num_stages=2)], ids=lambda m: type(m).__name__
)
def test_the_judge_gives_a_saved_plan_its_own_prediction(tmp_path, method):
    profiles = measured_as(
        tmp_path / "p.sqlite", lambda operator, seconds: seconds * (3.0 if operator.axes else 1.5)
    )
    plan = aq.plan(*STEP, cluster=CLUSTER, method=method, profiles=profiles)
    plan.save(tmp_path / "plan.json")
    again = aq.Plan.load(tmp_path / "plan.json")
    assert aq.estimate(again, *STEP, profiles=profiles) == plan.prediction == again.prediction
    assert aq.estimate(again, *STEP).step_time_s < plan.prediction.step_time_s
    assert "operators of 4 x NVIDIA H100 80GB HBM3 with JAX" in again.provenance.profiles
    assert again.prediction.measured_share > 0.4
    assert "of it measured, with a mean error of" in str(again)


def test_transfers_between_stages_take_as_long_as_measured(tmp_path):
    # A device sends 1 GB/s after 1 ms, half of four devices to the other half.
    profiles = measured_as(tmp_path / "p.sqlite", lambda operator, seconds: seconds)
    with ProfileDatabase(profiles) as database:
        link = read_measured(database, CLUSTER).transfer_link(False)
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (pytest.approx(1e-3), pytest.approx(1e9))
    plan = aq.plan(*STEP, cluster=CLUSTER, method=aq.PipeshardParallel(num_stages=2))
    plain, found = aq.estimate(plan, *STEP), aq.estimate(plan, *STEP, profiles=profiles)
    assert found.step_time_s > plain.step_time_s + 1e-3
    searched = aq.plan(
        *STEP, cluster=CLUSTER, method=aq.PipeshardParallel(num_stages=2), profiles=profiles
    )
    assert searched.prediction == aq.estimate(searched, *STEP, profiles=profiles)


def test_other_splits_are_priced_from_the_same_measurements(tmp_path):
    profiles = measured_as(tmp_path / "p.sqlite", lambda operator, seconds: 2 * seconds)
    plan = aq.plan(*STEP, cluster=CLUSTER, profiles=profiles)
    with pytest.raises(InputError, match="The plan was made from measurements"):
        aq.explain(plan, *STEP)
    for other in aq.explain(plan, *STEP, profiles=profiles):
        assert other.alternative_step_time_s >= 0.99 * other.chosen_step_time_s


def test_one_device_that_was_measured_serves_for_many(tmp_path):
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        for operator, seconds in (
            (LAUNCH, 1e-5),
            (Operator("product", "float32", (1, 32, 256, 64)), 1e-3),
        ):
            key = ProgramKey(
                program=str(operator),
                device=H100,
                num_devices=1,
                mesh="1",
                jax_version=jax.__version__,
            )
            database.put(key, Measurement(seconds=seconds))
        measured = read_measured(database, CLUSTER)
    assert measured.source.endswith("collectives are modelled") and set(measured.tables) == {
        "product float32"
    }
    assert (
        measured.tables["product float32"].grade == MEASURED_COMPUTE
        and MEASURED_COMPUTE in measured.source
    )


def on_one_device(path, *, factor, device=H100):
    """A database of what one device measures for `CLUSTER`, everything at `factor` times the cost
    model's seconds.
    """
    problem = make_problem(capture(*STEP), CLUSTER)
    with ProfileDatabase(path) as database:
        for operator, shape in alone_on_one_device(
            required_operators(problem, logical_mesh_shapes(4))
        ):
            assert shape == (1,)
            key = ProgramKey(
                program=str(operator),
                device=device,
                num_devices=1,
                mesh="1",
                jax_version=jax.__version__,
            )
            seconds = LAUNCH_S
            if operator != LAUNCH:
                seconds += factor * modelled_operator(operator, key, CLUSTER)[2]
            database.put(key, Measurement(seconds=seconds, spread=0.02, grade=MEASURED_COMPUTE))
    return path


def test_compute_of_one_device_prices_that_of_many_and_counts_apart(tmp_path):
    profiles = on_one_device(tmp_path / "p.sqlite", factor=3.0)
    plan = aq.plan(*STEP, cluster=CLUSTER, method=aq.DataParallel())
    found = aq.estimate(plan, *STEP, profiles=profiles)
    assert found.compute_s == pytest.approx(3.0 * plan.prediction.compute_s, rel=1e-6)
    assert found.gradient_s == pytest.approx(plan.prediction.gradient_s)
    total_s = found.compute_s + found.gradient_s + found.communication_s
    assert found.measured_share == 0.0
    assert found.measured_compute_share == pytest.approx(found.compute_s / total_s, rel=1e-6)
    assert 0.0 < found.measured_error <= 0.03
    made = aq.plan(*STEP, cluster=CLUSTER, method=aq.DataParallel(), profiles=profiles)
    assert made.prediction == found and "on one device alone (measured-compute)" in str(made)
    share = found.measured_compute_share
    asked = {
        "cluster": CLUSTER,
        "method": aq.DataParallel(),
        "profiles": profiles,
        "require_measured": share - 0.01,
    }
    with pytest.raises(
        InputError, match=r"0% of the plan's .* counts with --require-grade measured-compute"
    ):
        aq.plan(*STEP, **asked)
    assert aq.plan(*STEP, **asked, require_grade="measured-compute").prediction == found
    with pytest.raises(
        InputError, match=r"on one device alone \(grade measured-compute\), and 100% is required"
    ):
        aq.plan(*STEP, **{**asked, "require_measured": 1.0}, require_grade="measured-compute")
    with pytest.raises(InputError, match="require_grade='modelled'"):
        aq.plan(*STEP, **asked, require_grade="modelled")


def test_what_all_devices_measured_goes_before_what_one_did(tmp_path):
    profiles = on_one_device(tmp_path / "p.sqlite", factor=3.0)
    measured_as(profiles, lambda operator, seconds: 2.0 * seconds)
    plan = aq.plan(*STEP, cluster=CLUSTER, method=aq.DataParallel())
    found = aq.estimate(plan, *STEP, profiles=profiles)
    assert found.step_time_s == pytest.approx(2.0 * plan.prediction.step_time_s, rel=1e-6)
    assert (found.measured_share, found.measured_compute_share) == (pytest.approx(1.0), 0.0)


def test_one_cpu_device_stands_for_many_only_if_asked(tmp_path):
    """Virtual devices share the cores of their host."""
    here = Cluster.detect(jax.devices()[:4])
    key = ProgramKey(
        program="product float32 1x32x256x64",
        device=host_device(),
        num_devices=1,
        mesh="1",
        jax_version=jax.__version__,
    )
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        database.put(key, Measurement(seconds=1.0))
        with pytest.raises(InputError, match=r"measurements of 1 x cpu.* and none of 4 x cpu"):
            read_measured(database, here)
        database.put(key, Measurement(seconds=1.0, grade=MEASURED_COMPUTE))
        assert read_measured(database, here).tables["product float32"].grade == MEASURED_COMPUTE


def test_what_the_launch_of_a_program_hides_stays_as_modelled(tmp_path):
    product = Operator("product", "float32", (1, 32, 256, 64))
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        for operator, seconds in ((LAUNCH, 1e-4), (product, 1.1e-4)):
            key = ProgramKey(
                program=str(operator),
                device=H100,
                num_devices=4,
                mesh="4",
                jax_version=jax.__version__,
            )
            database.put(key, Measurement(seconds=seconds))
        assert not read_measured(database, CLUSTER).tables


def test_other_devices_and_releases_are_taken_only_if_asked(tmp_path):
    for name, facts in (("a", {"device": "NVIDIA A100-SXM4-80GB"}), ("b", {"version": "0.1"})):
        path = measured_as(tmp_path / name, lambda operator, seconds: 2 * seconds, **facts)
        with pytest.raises(InputError, match="--profiles-of-any"):
            aq.plan(*STEP, cluster=CLUSTER, profiles=path)
        plan = aq.plan(*STEP, cluster=CLUSTER, profiles=path, profiles_of_any=True)
        assert f"operators of 4 x {facts.get('device', H100)} with JAX" in plan.provenance.profiles
        assert plan.prediction.measured_share == pytest.approx(1.0)


def test_databases_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(InputError, match="There is no profile database"):
        aq.plan(*STEP, cluster=CLUSTER, profiles=tmp_path / "none.sqlite")
    ProfileDatabase(tmp_path / "empty.sqlite").close()
    with pytest.raises(InputError, match="holds no measured operators"):
        aq.plan(*STEP, cluster=CLUSTER, profiles=tmp_path / "empty.sqlite")
    with pytest.raises(InputError, match="need a profile database"):
        aq.plan(*STEP, cluster=CLUSTER, require_measured=0.5)
    with pytest.raises(InputError, match="the plan must be for the devices of this process"):
        aq.plan(*STEP, cluster=CLUSTER, profiles=tmp_path / "new.sqlite", measure=True)
    profiles = measured_as(tmp_path / "p.sqlite", lambda operator, seconds: seconds)
    assert aq.plan(*STEP, cluster=CLUSTER, profiles=profiles, require_measured=0.99)
    with ProfileDatabase(profiles) as database:
        kept = [row for row in database.rows() if not row[0].program.startswith("product")]
    with ProfileDatabase(tmp_path / "less.sqlite") as database:
        for key, measurement in kept:
            database.put(key, measurement)
    with pytest.raises(InputError, match="90% is required"):
        aq.plan(*STEP, cluster=CLUSTER, profiles=tmp_path / "less.sqlite", require_measured=0.9)


@pytest.mark.slow
def test_measuring_ends_when_the_best_plan_needs_nothing_more(tmp_path):
    profiles = tmp_path / "p.sqlite"
    plan = aq.plan(*STEP, profiles=profiles, measure=True)
    with ProfileDatabase(profiles) as database:
        held = len(database)
    again = aq.plan(*STEP, profiles=profiles, measure=True)
    with ProfileDatabase(profiles) as database:
        assert len(database) == held > 5
    assert again.prediction == plan.prediction and plan.cluster["num_hosts"] == 1
    step = aq.parallelize(two := STEP[0], plan)
    params = {
        "up": np.full((64, 256), 0.01, np.float32),
        "down": np.full((256, 64), 0.02, np.float32),
    }
    x = np.ones((128, 64), np.float32)
    np.testing.assert_allclose(step(params, x)[1], two(params, x)[1], rtol=1e-5)


FIGURES = {
    "matmul_efficiency": 0.55,
    "product_tile": 128.0,
    "product_depth": 200.0,
    "product_traffic": 0.8,
    "bandwidth_efficiency": 0.7,
    "collective_efficiency": 0.6,
    "all_to_all_efficiency": 0.5,
    "scatter_gather_share": 0.9,
    "collective_overhead_s": 20e-6,
}


def test_a_fit_finds_the_figures_that_measurements_were_made_with(tmp_path):
    truth = replace(CLUSTER, device=replace(CLUSTER.device, calibration=FIGURES))
    profiles = measured_as(
        tmp_path / "p.sqlite", lambda operator, seconds: seconds, of=truth, step=LARGE
    )
    with ProfileDatabase(profiles) as database:
        fit = fit_profiles(database, CLUSTER)
    found = fit.cluster.device.calibration
    for name in (
        "matmul_efficiency",
        "bandwidth_efficiency",
        "collective_efficiency",
        "all_to_all_efficiency",
    ):
        assert found[name] == pytest.approx(FIGURES[name], rel=0.05), name
    assert all(
        row["after"] < 0.05 < row["before"] for row in fit.errors if row["table"] != "traffic"
    ), fit.errors
    (tmp_path / "c.toml").write_text(to_toml(fit))
    read = Cluster.load(tmp_path / "c.toml")
    assert read.device.calibration == {k: float(f"{v:.4g}") for k, v in found.items()}
    assert read.intra == CLUSTER.intra and target_for(
        read.device
    ).matmul_efficiency == pytest.approx(0.55, rel=0.05)
    plan = aq.plan(*LARGE, cluster=read)
    assert Cluster.from_dict(plan.cluster) == read and aq.estimate(plan, *LARGE) == plan.prediction
    assert plan.prediction.step_time_s > aq.plan(*LARGE, cluster=CLUSTER).prediction.step_time_s


def test_a_fit_to_operators_keeps_what_whole_steps_sustain(tmp_path):
    """Operators run alone, at the speed of which steps sustain a share."""
    figures = {**FIGURES, "matmul_efficiency": 0.9, "sustained_share": 0.5}
    sustained = {"sustained_share": 0.5, "overlap_fraction": 0.75}
    truth, cluster = (
        replace(CLUSTER, device=replace(CLUSTER.device, calibration=calibration))
        for calibration in (figures, sustained)
    )
    profiles = measured_as(
        tmp_path / "p.sqlite", lambda operator, seconds: seconds, of=truth, step=LARGE
    )
    with ProfileDatabase(profiles) as database:
        fit = fit_profiles(database, cluster)
    assert sustained.items() <= fit.cluster.device.calibration.items()
    assert fit.cluster.device.peak_flops_per_s == CLUSTER.device.peak_flops_per_s
    assert fit.figures["matmul_efficiency"]["value"] == pytest.approx(0.9, rel=0.05)
    assert not sustained.keys() & fit.figures.keys()


def test_more_than_a_peak_raises_the_peak(tmp_path):
    profiles = measured_as(tmp_path / "p.sqlite", lambda operator, seconds: seconds / 5, step=LARGE)
    with ProfileDatabase(profiles) as database:
        fit = fit_profiles(database, CLUSTER)
    assert fit.cluster.device.calibration["matmul_efficiency"] == 1.0
    assert fit.cluster.device.peak("bfloat16") > 2 * CLUSTER.device.peak("bfloat16")
    (tmp_path / "c.toml").write_text(to_toml(fit))
    assert Cluster.load(tmp_path / "c.toml").device.peak("bfloat16") == fit.cluster.device.peak(
        "bfloat16"
    )


def test_figures_of_a_device_are_checked():
    with pytest.raises(
        aq.ClusterError, match=r"calibration has 'speed'.*(.|\n)*must not be negative"
    ):
        replace(CLUSTER.device, calibration={"speed": 1.0, "matmul_efficiency": -1.0})
