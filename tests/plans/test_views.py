"""What is read off a plan: text, differences, PartitionSpecs, groups of equal arrays."""

import msgspec
from jax.sharding import PartitionSpec
from sample_plans import INPUTS, PREDICTION, SPLITS, STAGE, sample_plan

from aliquot.plans import Change, diff, grouped_arrays

replace = msgspec.structs.replace


def test_text_names_what_was_decided_and_predicted():
    text = str(sample_plan())
    for part in (
        "gpt-10m: shard on mesh 4x2 (x, y) of 8xH100",
        "step time (predicted)  11.0 ms = 8.0 ms compute + 2.0 ms communication",
        "at most 10.00% above the best (all splits of mesh 4x2); optimal",
        "state.params.layers[*].w",
        "float32[64, 32]",
        "[x, y]",
        "all-reduce",
        "2 (outputs combine by sum: [1]['loss'])",
    ):
        assert part in text


def test_text_of_odd_plans():
    odd = sample_plan(stages=(), prediction=replace(PREDICTION, collectives=(), memory_limit_bytes=0.0))
    assert "No communication is predicted." in str(odd)


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
        sample_plan(), sample_plan(method="dp", stages=(stage,), prediction=replace(PREDICTION, step_time_s=0.02))
    )
    assert found.decisions == (
        Change(section="decision", subject="method", before="shard", after="dp"),
        Change(section="decision", subject="input batch.inputs", before="[x, -]", after="replicated"),
    )
    assert found.predictions == (Change(section="prediction", subject="step_time_s", before=0.011, after=0.02),)
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
