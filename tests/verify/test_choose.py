"""Plans are compiled until one truly fits, and what was found on the way is said."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import pytest
from msgspec import structs
from planners.small_steps import tanh
from sample_plans import PREDICTION, sample_plan
from verify.verdicts import TARGET, verified

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.core import InfeasibleError
from aliquot.plans import Plan
from aliquot.verification import Verification, first_that_fits


def planned(predicted_bytes: float, method: str) -> Plan:
    prediction = msgspec.structs.replace(PREDICTION, peak_memory_bytes=predicted_bytes)
    return sample_plan(prediction=prediction, method=method)


class Search:
    """Plans by rising time, each with `(predicted, compiled)` bytes; the first that is predicted to
    fit is proposed.
    """

    def __init__(self, *sizes: tuple[float, int]) -> None:
        self.sizes, self.limits = sizes, []

    def propose(self, limit: float | None) -> Plan:
        self.limits.append(limit)
        for number, (predicted, _) in enumerate(self.sizes):
            if predicted <= (TARGET.limit_bytes if limit is None else limit):
                return planned(predicted, f"method{number}")
        least = min(predicted for predicted, _ in self.sizes)
        raise InfeasibleError(
            "nothing fits", required_bytes=least, available_bytes=TARGET.limit_bytes
        )

    def check(self, plan: Plan) -> Verification:
        return verified(plan, self.sizes[int(plan.method[-1])][1])

    def run(self) -> Plan:
        return first_that_fits(self.propose, self.check)


def test_the_best_plan_if_it_fits():
    search = Search((900, 950), (500, 500))
    plan = search.run()
    assert (plan.method, plan.compiled.fits, plan.compiled.peak_memory_bytes) == (
        "method0",
        True,
        950,
    )
    assert search.limits == [None]
    assert any("all-to-all over x: 2 times, 64 B, dot at a.py:3 (f)" in note for note in plan.notes)


def test_the_next_one_is_planned_with_what_was_learned():
    search = Search((900, 1800), (700, 1400), (450, 800))
    plan = search.run()
    # 1000 of 1800 bytes: what is predicted to take 500 will fit.
    assert search.limits == [None, 500.0]
    assert plan.method == "method2"
    assert any("predicted to be faster does not fit: method0" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((900, 5000),), "none is left: nothing fits"),
        (((900, 1100), (810, 1100), (730, 1100)), "No more than 3"),
    ],
)
def test_none_fits(sizes, message):
    with pytest.raises(InfeasibleError) as refusal:
        Search(*sizes).run()
    assert message in str(refusal.value) and "method0 on a mesh 4x2 needs" in str(refusal.value)
    assert refusal.value.required_bytes > refusal.value.available_bytes == 1000


def test_none_is_predicted_to_fit():
    search = Search((2000, 1))
    with pytest.raises(InfeasibleError, match="^nothing fits"):
        search.run()
    assert search.limits == [None]


def test_the_smallest_is_compiled_where_none_is_predicted_to_fit():
    plan = Search((1800, 900), (1400, 950)).run()
    assert plan.method == "method1" and plan.compiled.fits
    assert plan.notes[0] == "It was predicted not to fit, and fits by its compiler's account."
    with pytest.raises(InfeasibleError) as refusal:
        Search((1400, 1100)).run()
    assert "Compiled for H100, the smallest needs 1.1 KiB." in str(refusal.value)


def test_planning_with_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (16, 32))]
    plan = aq.plan(step, *shapes, cluster=Cluster.preset("4xcpu"), verify=True)
    assert plan.compiled.fits and plan.compiled.target == "cpu"
    assert plan.compiled.memory_bytes["arguments"] > 0
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    # Files do not say how long the compiler took, so that equal plans are equal files.
    assert again == plan
    assert again.compiled == structs.replace(plan.compiled, compile_s=0.0)
    assert "Compiled for cpu" in str(again)


def test_a_pipeline_that_does_not_fit_is_planned_again(monkeypatch):
    checked = []

    def verdict(step, **options):
        plan = step.plan
        checked.append(plan)
        limit = plan.prediction.memory_limit_bytes
        found = verified(plan, int(1.01 * limit) if len(checked) == 1 else 10)
        return replace(found, limit_bytes=limit)

    monkeypatch.setattr(sys.modules["aliquot.verification"], "verify_plan", verdict)

    def step(layers, x):
        def loss(layers):
            y = x
            for w in layers:
                y = tanh(y @ w)
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))

    shapes = (
        [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
    )
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=4)
    options = {"cluster": Cluster.preset("8xcpu"), "method": method, "verify": True}
    plan = aq.plan(step, *shapes, recompute="none", **options)
    first, second = (each.prediction for each in checked)
    assert second.peak_memory_bytes < 0.99 * first.peak_memory_bytes
    assert second.memory_limit_bytes == first.memory_limit_bytes
    assert plan.schedule == checked[1].schedule and plan.compiled.fits
    assert any(
        "predicted to be faster does not fit: pipeshard in 2 stages needs" in note
        for note in plan.notes
    )
