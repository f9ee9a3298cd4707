"""What is read off a plan: text, differences, PartitionSpecs, groups of equal arrays."""

import msgspec
import pytest
from jax.sharding import PartitionSpec
from sample_plans import (
    INPUTS,
    PREDICTION,
    SPLITS,
    STAGE,
    sample_pipeline,
    sample_plan,
    sample_stage,
)

from aliquot.plans import Change, diff, grouped_arrays
from aliquot.plans._facts import bound

replace = msgspec.structs.replace


def test_text_names_what_was_decided_and_predicted():
    text = " ".join(sample_plan().describe(every=True).split())  # Lines wrap.
    for part in (
        "gpt-10m on 8xH100, by method shard Combine 4-way sharding of arrays and",
        "step time (predicted) 11.0 ms = 8.0 ms compute + 3.0 ms exposed communication;",
        "all communication 5.0 ms, of which 2.0 ms overlap with compute; 3.0 ms are for gradients",
        "at most 10.00% above the fastest of all splits of mesh 4x2",
        "state.params.layers[*].w",
        "float32[64, 32]",
        "[x, y]",
        "all-reduce",
        "2, accumulated to the result of the whole batch; output [1]['loss'] is summed over them",
    ):
        assert part in text


def test_text_names_only_outputs_that_differ_between_micro_batches():
    both = sample_plan(combine={"[0].w": "equal", "[1]['loss']": "sum"})
    assert (
        "2, accumulated to the result of the whole batch; output [1]['loss'] is summed over them"
        in " ".join(str(both).split())
    )
    equal = sample_plan(combine={"[0].w": "equal", "[1]['loss']": "equal"})
    assert "over them" not in str(equal)


def test_text_of_odd_plans():
    odd = sample_plan(
        stages=(), prediction=replace(PREDICTION, collectives=(), memory_limit_bytes=0.0)
    )
    assert "No communication is predicted." in odd.describe(every=True)


def test_equal_arrays_of_layers_form_a_group():
    groups = grouped_arrays(INPUTS, STAGE, SPLITS)
    first = groups[0]
    assert (first.pattern, first.count, first.total_bytes, first.local_bytes) == (
        "state.params.layers[*].w",
        2,
        2 * 64 * 32 * 4,
        2 * 64 * 32 * 4 / 8,
    )
    assert [group.pattern for group in groups[1:]] == ["batch.inputs", "state.step"]


def test_partition_specs():
    stage = replace(STAGE, shardings={**SPLITS, "batch.inputs": (("x", "y"), ())})
    specs = sample_plan(stages=(stage,)).partition_specs()
    assert list(specs) == [array.path for array in INPUTS]
    assert specs["state.params.layers[0].w"] == PartitionSpec("x", "y")
    assert specs["batch.inputs"] == PartitionSpec(("x", "y"), None)
    assert specs["state.step"] == PartitionSpec()


def test_equal_plans_do_not_differ():
    assert diff(sample_plan(), sample_plan()).identical


def test_differences_term_by_term():
    stage = replace(STAGE, shardings={**SPLITS, "batch.inputs": ((), ())})
    found = diff(
        sample_plan(),
        sample_plan(method="dp", stages=(stage,), prediction=replace(PREDICTION, step_time_s=0.02)),
    )
    assert found.decisions == (
        Change(section="decision", subject="method", before="shard", after="dp"),
        Change(
            section="decision", subject="input batch.inputs", before="[x, -]", after="replicated"
        ),
    )
    assert found.predictions == (
        Change(section="prediction", subject="step_time_s", before=0.011, after=0.02),
    )
    assert found.to_dict()["identical"] is False


def test_a_plan_for_another_step_differs_by_its_arrays():
    found = diff(sample_plan(), sample_plan(inputs=INPUTS[1:]))
    assert found.changes == (
        Change(
            section="decision",
            subject="interface of input state.params.layers[0].w",
            before="float32[64, 32]",
            after=None,
        ),
    )


def test_differences_of_pipelines():
    before = sample_pipeline(4)
    stages = [
        replace(stage, mesh_shape=(1,), first_device=index)
        for index, stage in enumerate(before.stages)
    ]
    stages[0] = replace(stages[0], recompute="stage")
    after = replace(
        before,
        stages=tuple(stages),
        schedule="zero-bubble",
        num_micro_batches=8,
        layers="4",
        scan_bounds=(0, 2, 4),
    )
    found = {
        change.subject: (change.before, change.after) for change in diff(before, after).decisions
    }
    assert found == {
        "num_micro_batches": (4, 8),
        "schedule": ("1f1b", "zero-bubble"),
        "layers": ("every good place", "4"),
        "scan_bounds": ("none", "0, 2, 4"),
        **{f"stage {k} mesh": ("2", "1") for k in range(4)},
        **{f"stage {k} devices": (f"{2 * k}-{2 * k + 1}", f"{k}") for k in range(4)},
        "stage 0 recompute": ("no", "stage"),
    }


def test_stages_that_are_cut_elsewhere_do_not_change_the_arrays():
    one = sample_pipeline(4)
    both = sample_stage(0, layer_names=("state.params.layers[0]", "state.params.layers[1]"))
    both = replace(both, shardings=one.stages[0].shardings | one.stages[1].shardings)
    subjects = [
        c.subject for c in diff(one, sample_pipeline(4, stages=(both, *one.stages[2:]))).decisions
    ]
    assert "num_stages" in subjects and "stage 0 layers" in subjects and "stage 3 mesh" in subjects
    assert not any(subject.startswith("input ") for subject in subjects)


def test_predictions_of_stages_differ():
    plan = sample_pipeline(2)
    slow = replace(
        plan.stages[1], prediction=replace(plan.stages[1].prediction, forward_s=0.5, bubble=0.5)
    )
    found = diff(plan, replace(plan, stages=(plan.stages[0], slow))).predictions
    assert [(c.subject, c.before, c.after) for c in found] == [
        ("stage 1 forward_s", 0.001, 0.5),
        ("stage 1 bubble", plan.stages[1].prediction.bubble, 0.5),
    ]


def test_operators_are_compared_where_the_stages_are_the_same():
    before = sample_pipeline(2)
    split = replace(before.stages[1].interior[0], splits={})
    other = replace(before, stages=(before.stages[0], replace(before.stages[1], interior=(split,))))
    subjects = [change.subject for change in diff(before, other).decisions]
    assert subjects == ["stage 1 operator layers[1] dot_general"]
    assert not any(
        "operator" in change.subject for change in diff(before, sample_pipeline(4)).decisions
    )


@pytest.mark.parametrize(
    ("holds_for", "status", "gap", "wanted"),
    [
        (
            "all copies of all layers",
            "optimal",
            0.0,
            "proven optimal: 0% above the fastest of all plans",
        ),
        (
            "gap_within_folded_space",
            "optimal",
            0.0,
            "proven optimal: 0% above the fastest of plans with equal layers split alike",
        ),
        (
            "gap_within_folded_space",
            "optimal within the gap",
            0.004,
            "at most 0.40% above the fastest of plans with equal layers split alike",
        ),
        (
            "gap_within_neighbourhood",
            "node limit reached",
            0.1,
            (
                "at most 10.00% above the fastest of plans near those of coarser meshes; node limit"
                " reached"
            ),
        ),
    ],
)
def test_bounds_are_stated_in_words(holds_for, status, gap, wanted):
    plan = sample_plan()
    provenance = replace(
        plan.provenance, bound_holds_for=holds_for, status=status, gap=gap, lower_bound_s=0.025
    )
    assert f" bound {wanted} largest costs " in " ".join(
        str(replace(plan, provenance=provenance)).split()
    )


def test_a_closed_form_above_the_simulated_time_is_called_no_bound_of_it():
    slower = replace(sample_pipeline().provenance, lower_bound_s=0.022)
    text = bound(replace(sample_pipeline(), provenance=slower))
    assert text == (
        "none: the least by formula for pipelines, 4 micro-batches, 1f1b is 22.0 ms; simulated,"
        " this plan takes 2.3% less"
    )
    assert "lower bound" not in text
