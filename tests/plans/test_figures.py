"""Figures of a plan as every answer with `--json` names them, parts of a step, and rates."""

import pytest
from msgspec.structs import replace
from sample_plans import PREDICTION, sample_pipeline, sample_plan

from aliquot.plans import figures, rate, step_parts


def test_figures_have_the_names_of_the_plan_file():
    plan = sample_plan()
    found = figures(plan)
    assert (found["step_time_s"], found["peak_memory_bytes"]) == (0.011, 3000.0)
    assert found["memory_bytes"] == {"parameters": 2048.0, "activations": 952.0}
    assert found["tokens_per_s"] == pytest.approx(8 * 16 / 0.011)
    assert found["examples_per_s"] == pytest.approx(8 / 0.011)
    assert found["mfu"] is None
    # Without a plan, the same keys.
    assert figures(None) == dict.fromkeys(found)


def test_throughput_is_that_from_one_call_to_the_next():
    plan = sample_plan()
    known = replace(plan, model=replace(plan.model, flops_per_step=1e12))
    alone, streamed = figures(known), figures(known, seconds=0.0055)
    for name in ("mfu", "tokens_per_s", "examples_per_s"):
        assert streamed[name] == pytest.approx(2 * alone[name])
    assert streamed["step_time_s"] == alone["step_time_s"]


@pytest.mark.parametrize("plan", [sample_plan(), sample_pipeline()], ids=["program", "pipeline"])
def test_parts_add_up_to_the_step(plan):
    parts = step_parts(plan)
    assert sum(parts.values()) == pytest.approx(plan.prediction.step_time_s)
    assert parts["exposed communication"] > 0


def test_rates_count_tokens_or_else_examples():
    plan = sample_plan()
    assert rate(plan) == (pytest.approx(128 / 0.011), "tokens")
    assert rate(plan, 1.0) == (128.0, "tokens")
    images = tuple(
        replace(array, dtype="float32") if array.role == "batch" else array for array in plan.inputs
    )
    assert rate(replace(plan, inputs=images), 2.0) == (4.0, "examples")
    still = replace(plan, prediction=replace(PREDICTION, step_time_s=0.0))
    assert rate(still) == (0.0, "tokens") and figures(still)["tokens_per_s"] is None
