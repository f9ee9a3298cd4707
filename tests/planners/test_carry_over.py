"""Plans carried over to the same step with another learning rate."""

import dataclasses

import jax
import numpy as np
import pytest
from msgspec import structs

import aliquot as aq
from aliquot.core import PlanMismatchError
from aliquot.graph import capture
from aliquot.planners import apply_plan, carried_over, method_by_name
from aliquot.zoo import MODELS, build

SMALL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 32,
    "vocab_size": 64,
    "seq_len": 8,
}
FOUR = {**SMALL, "num_layers": 4}
SCHEDULE = {"peak": 1e-1, "end": 1e-2, "warmup_steps": 1, "decay": "cosine", "steps": 4}
CLUSTER = aq.Cluster.preset("4xcpu")
RATES = [
    pytest.param(0.1, SCHEDULE, id="constant to schedule"),
    pytest.param(SCHEDULE, 0.1, id="schedule to constant"),
]


def made(rate, *, model="gpt-10m", sizes=SMALL, dtype="float32", **options):
    """A small model, with its step as captured."""
    config = dataclasses.replace(MODELS[model], **sizes)
    work = build(config, 8, learning_rate=rate, dtype=dtype, **options)
    return work, capture(work.train_step, work.state, work.batch)


def planned(work, method, parts=1):
    if not isinstance(method, str):
        method = aq.PipeshardParallel(num_stages=method[1], schedule=method[0])
    return aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=CLUSTER,
        method=method_by_name(method) if isinstance(method, str) else method,
        num_micro_batches=parts,
    )


def decided(plan):
    """All that a plan says but how it was found, what it costs, and of which model it is."""
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    for name in ("model", "prediction", "provenance", "compiled", "notes"):
        del fields[name]
    names = [name for name in plan.stages[0].__struct_fields__ if name != "prediction"]
    return fields | {"stages": [{n: getattr(s, n) for n in names} for s in plan.stages]}


CASES = {
    "dp": ("dp", 2, {}),
    "zero2, adafactor, clipped": ("zero2", 1, {"optimizer": "adafactor", "clip_norm": 1.0}),
    "fsdp, sgd": ("fsdp", 1, {"optimizer": "sgd"}),
    "tp, scan": ("megatron:dp2,tp2", 1, {"scan": True}),
    "auto, master copy": ("auto", 2, {"dtype": "bf16-master", "momentum": 0.9, "optimizer": "sgd"}),
    "float16": ("dp", 1, {"dtype": "float16", "grad_norm": True}),
    "1f1b": (("1f1b", 2), 2, {}),
    "gpipe, sgd": (("gpipe", 2), 2, {"optimizer": "sgd"}),
    "zero bubble, adafactor, clipped": (
        ("zero-bubble", 2),
        2,
        {"optimizer": "adafactor", "clip_norm": 1.0},
    ),
    "1f1b, scan": (("1f1b", 2), 2, {"scan": True}),
    "like stages, sgd": ("megatron:pp4", 2, {"optimizer": "sgd", "sizes": FOUR}),
    "virtual stages": ("megatron:dp2,pp2,vpp2", 2, {"sizes": FOUR}),
}
QUICK = ("zero2, adafactor, clipped", "fsdp, sgd", "1f1b")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_a_carried_plan_is_the_plan_that_is_made_for_the_other_step(case):
    method, parts, options = CASES[case]
    (_, constant), (_, scheduled) = graphs = [made(rate, **options) for rate in (0.1, SCHEDULE)]
    of_constant, of_scheduled = (planned(work, method, parts) for work, _ in graphs)
    carried = carried_over(apply_plan(of_constant, constant), scheduled)
    assert decided(carried) == decided(of_scheduled)
    back = carried_over(apply_plan(carried, scheduled), constant)
    assert decided(back) == decided(of_constant)
    assert back.prediction == of_constant.prediction


@pytest.mark.parametrize(("before", "after"), RATES)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("zero2", {}, id="program"),
        pytest.param(("1f1b", 2), {"optimizer": "sgd"}, id="pipeline"),
    ],
)
def test_a_carried_plan_trains_as_the_plain_step(method, options, before, after):
    with jax.enable_x64(True):
        work, graph = made(before, dtype="float64", **options)
        other, other_graph = made(after, dtype="float64", **options)
        carried = carried_over(apply_plan(planned(work, method, 2), graph), other_graph)
        step, plain = aq.parallelize(other.train_step, carried), jax.jit(other.train_step)
        expected = found = other.init(jax.random.key(0))
        for number in range(3):
            draw = np.random.default_rng(number)
            batch = jax.tree.map(
                lambda x: draw.integers(0, 64, x.shape).astype(x.dtype),  # noqa: B023
                other.batch,
            )
            expected, wanted = plain(expected, batch)
            found, metrics = step(found, batch)
            assert metrics.keys() == wanted.keys()
            assert ("learning_rate" in metrics) == (after is SCHEDULE)
            for name, value in wanted.items():
                assert float(metrics[name]) == pytest.approx(float(value), rel=1e-10), name
        # Biases of keys have no gradients but rounding, which Adam makes larger.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10),
            jax.device_get(found),
            jax.device_get(expected),
        )


def test_what_a_plan_says_of_an_array_stays():
    work, graph = made(0.1, optimizer="sgd")
    plan = planned(work, "zero2")
    path = next(each.path for each in plan.inputs if each.path.endswith("batch.inputs"))
    (stage,) = plan.stages
    whole = structs.replace(stage, shardings={**stage.shardings, path: ((), ())})
    edited = structs.replace(plan, stages=(whole,))
    carried = carried_over(apply_plan(edited, graph), made(SCHEDULE, optimizer="sgd")[1])
    assert carried.stages[0].shardings[path] == ((), ())
    assert carried.stages[0].shardings["state.opt_state[1].count"] == ()


@pytest.mark.parametrize(
    ("options", "other", "messages"),
    [
        ({}, {"optimizer": "sgd"}, ["only the planned step has the input `state.opt_state[0].mu"]),
        ({"optimizer": "sgd"}, {}, ["only the other step has the output `[0].opt_state[0].mu"]),
        ({}, {"dtype": "bf16-master"}, ["state.params", "is planned as float32[", "is bfloat16["]),
        ({}, {"clip_norm": 1.0}, ["other operators make its arrays"]),
        ({"optimizer": "sgd"}, {"optimizer": "sgd", "weight_decay": 0.1}, ["other operators"]),
    ],
    ids=["sgd", "adamw", "master copy", "clipping", "weight decay"],
)
def test_a_step_that_differs_in_arrays_is_refused(options, other, messages):
    work, graph = made(0.1, **options)
    step = apply_plan(planned(work, "dp"), graph)
    with pytest.raises(PlanMismatchError, match="in more than scalars") as refused:
        carried_over(step, made(SCHEDULE, **other)[1])
    faults = "\n".join(refused.value.violations)
    assert [message for message in messages if message not in faults] == []
