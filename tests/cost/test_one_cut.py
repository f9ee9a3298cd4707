"""What the judge prices of a pipeline is what its programs do: the operators that backward programs
repeat, and the values that stages exchange.
"""

from __future__ import annotations

import functools

import pytest

import aliquot as aq
from aliquot.cluster import DEVICES
from aliquot.cost._repeated import repeated_operators
from aliquot.graph import Call, Phase, capture, split_scans, traits_of
from aliquot.graph._jax_compat import ATTENTION
from aliquot.planners import apply_plan
from aliquot.plans import SCHEDULES
from aliquot.sharding import Part, cut_pipeline, layer_step, stage_step

SMALL = {"hidden_size": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}
MODELS = {
    "gpt": ("gpt-125m", {**SMALL, "num_layers": 3}, {"recompute": "none"}),
    "gpt, recomputed blocks": ("gpt-125m", {**SMALL, "num_layers": 3}, {"recompute": "block"}),
    "gpt, float32": ("gpt-125m", {**SMALL, "num_layers": 3}, {"dtype": "float32"}),
    "gpt, scanned": ("gpt-125m", {**SMALL, "num_layers": 3}, {"scan": True}),
    "bert": ("bert-base", {**SMALL, "num_layers": 3}, {"recompute": "none"}),
    "gpt, fused attention": (
        "gpt-125m",
        {**SMALL, "num_layers": 3},
        {"recompute": "none", "dtype": "bf16", "attention": "fused", "device": DEVICES["H100"]},
    ),
    "llama": ("llama-7b", {**SMALL, "num_layers": 3, "ffn_size": 64}, {"recompute": "none"}),
    "moe": ("moe-380m", {**SMALL, "num_layers": 4, "num_experts": 4}, {"recompute": "none"}),
}
NUM_STAGES = 3


@functools.cache
def staged(model, num_micro_batches):
    name, sizes, options = MODELS[model]
    work = aq.zoo.build(aq.zoo.configure(name, **sizes), 16, **options)
    graph = capture(work.train_step, work.state, work.batch)
    if options.get("scan"):
        graph = split_scans(graph, range(NUM_STAGES + 1)).graph
    layered = layer_step(graph, num_micro_batches)
    count = len(layered.layers)
    return stage_step(layered, [round(k * count / NUM_STAGES) for k in range(NUM_STAGES)])


def cut(step, num_micro_batches, schedule, recompute, groups=1):
    return cut_pipeline(
        step.graph,
        step.staging,
        [groups] * NUM_STAGES,
        num_micro_batches=num_micro_batches,
        split_backward=SCHEDULES[schedule].splits_backward,
        recompute=recompute,
    ).programs.programs


def operators_in(items):
    """All operators of a program, those inside loops and regions included."""
    return {
        op
        for item in items
        for op in (
            operators_in([i for block in item.blocks for i in block.items])
            if isinstance(item, Call)
            else (item,)
        )
    }


def repeatable(extract, recompute):
    """The operators of a stage that it may repeat, by their numbers in the stage; None for all."""
    if recompute == "stage":
        return None
    costly = [
        op.index
        for op in extract.graph.ops
        if op.phase is Phase.FORWARD and traits_of(op.name).costly
    ]
    # Every second one, so that some are kept and some repeated.
    return frozenset(costly[::2]) if recompute == "operators" else frozenset()


@pytest.mark.parametrize("recompute", ["operators", "stage"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("model", [m for m in MODELS if m != "gpt, float32"])
def test_priced_recomputation_is_what_backward_programs_repeat(
    model, num_micro_batches, schedule, recompute
):
    step = staged(model, num_micro_batches)
    may_repeat = [repeatable(extract, recompute) for extract in step.extracts]
    programs = cut(
        step,
        num_micro_batches,
        schedule,
        {
            k: None if ops is None else frozenset(extract.ops[op] for op in ops)
            for k, (extract, ops) in enumerate(zip(step.extracts, may_repeat, strict=True))
        },
    )
    forward_stage = {
        op: stage
        for item, stage in zip(step.staging.items, step.staging.stage, strict=True)
        for op in item.ops
        if item.phase is Phase.FORWARD
    }
    repeated_at_all = set()
    for k, (extract, ops) in enumerate(zip(step.extracts, may_repeat, strict=True)):
        priced = {extract.ops[op] for op in repeated_operators(extract.graph, ops).again}
        backward = [
            operators_in(p.graph.body.items)
            for p in programs
            if p.stage == k and p.part not in (Part.EARLY, Part.FORWARD, Part.UPDATE)
        ]
        found = {op for op in set().union(*backward) if forward_stage.get(op) == k}
        assert priced == found
        repeated_at_all |= found
    assert repeated_at_all


@pytest.mark.parametrize("recompute", ["none", "operators", "stage"])
@pytest.mark.parametrize("model", [m for m in MODELS if m != "gpt, float32"])
def test_priced_arrays_are_what_forward_programs_keep(model, recompute):
    step = staged(model, 4)
    may_repeat = [repeatable(extract, recompute) for extract in step.extracts]
    programs = cut(
        step,
        4,
        "1f1b",
        {
            k: None if ops is None else frozenset(extract.ops[op] for op in ops)
            for k, (extract, ops) in enumerate(zip(step.extracts, may_repeat, strict=True))
            if recompute != "none"
        },
    )
    for k, (extract, ops) in enumerate(zip(step.extracts, may_repeat, strict=True)):
        entering = {i.value for i in extract.graph.inputs}
        priced = repeated_operators(extract.graph, ops).kept - entering
        values = extract.graph.values
        read = {v for p in programs if (p.stage, p.part) == (k, Part.BACKWARD) for v in p.imports}
        kept = {
            v: p.graph.values[v].num_bytes
            for p in programs
            if (p.stage, p.part) == (k, Part.FORWARD)
            for v in p.kept & read
        }
        assert sum(values[v].num_bytes for v in priced) == sum(kept.values())


def test_no_attention_is_repeated_unless_that_is_asked_for():
    step = staged("gpt, fused attention", 4)
    programs = cut(step, 4, "1f1b", {})
    made = {
        op.name
        for p in programs
        if p.part is Part.BACKWARD
        for op in p.graph.ops
        if op.index in operators_in(p.graph.body.items)
    }
    assert ATTENTION[1] in made and ATTENTION[0] not in made


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(
    ("schedule", "num_micro_batches", "groups"),
    [
        ("gpipe", 1, 1),
        ("1f1b", 4, 1),
        ("interleaved-1f1b", 4, 2),
        ("zero-bubble", 4, 1),
        *(
            pytest.param(schedule, count, groups, marks=pytest.mark.slow)
            for schedule, count, groups in (
                ("gpipe", 4, 1),
                ("gpipe", 4, 2),
                ("1f1b", 1, 1),
                ("1f1b", 4, 2),
                ("interleaved-1f1b", 1, 1),
                ("interleaved-1f1b", 4, 1),
                ("zero-bubble", 1, 1),
                ("zero-bubble", 4, 2),
            )
        ),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_priced_values_are_those_that_programs_exchange(
    model, num_micro_batches, groups, schedule, recompute
):
    step = staged(model, num_micro_batches)
    repeat = dict.fromkeys(range(NUM_STAGES)) if recompute == "stage" else {}
    programs = cut(step, num_micro_batches, schedule, repeat, groups)
    made_by = {
        v: p.stage for p in programs if p.part is not Part.UPDATE for v in (*p.exports, *p.totals)
    }
    forward = [set() for _ in range(NUM_STAGES - 1)]
    backward = [set() for _ in range(NUM_STAGES - 1)]
    for program in programs:
        if program.part is Part.UPDATE:
            continue
        for value in program.imports:
            for k in range(NUM_STAGES - 1):
                if made_by[value] <= k < program.stage:
                    forward[k].add(value)
                if program.stage <= k < made_by[value]:
                    backward[k].add(value)
    assert (list(step.crossing.forward), list(step.crossing.backward)) == (forward, backward)
    values = step.crossing.graph.values
    for found, priced_bytes in (
        (forward, step.crossing.forward_bytes),
        (backward, step.crossing.backward_bytes),
    ):
        assert [sum(values[v].num_bytes for v in at) for at in found] == list(priced_bytes)
    assert all(step.crossing.forward) and all(step.crossing.backward)


@pytest.mark.parametrize("num_micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "added", [{}, {"grad_norm": True}, {"clip_norm": 1.0}, {"loss_scaling": "dynamic"}]
)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_stages_updated_early_are_those_whose_programs_wait_for_no_other(
    model, added, num_micro_batches
):
    name, sizes, options = MODELS[model]
    work = aq.zoo.build(aq.zoo.configure(name, **sizes), 16, **options, **added)
    layered = layer_step(capture(work.train_step, work.state, work.batch), num_micro_batches)
    count = len(layered.layers)
    step = stage_step(layered, [round(k * count / NUM_STAGES) for k in range(NUM_STAGES)])
    programs = cut(step, num_micro_batches, "1f1b", {})
    made_by = {v: p.stage for p in programs for v in (*p.exports, *p.totals, *p.combines)}
    given = {v for p in programs for v in p.given}
    waiting = {
        p.stage
        for p in programs
        # A program that makes figures alone may wait.
        if p.part is Part.UPDATE
        and given.intersection(p.given)
        and any(made_by[v] != p.stage for v in p.imports)
    }
    assert step.early_updates == set(range(NUM_STAGES)) - waiting
    # GPT's head is its embedding, whose gradients come from both ends of the pipeline.
    assert bool(waiting) == (model == "gpt" or "clip_norm" in added or "loss_scaling" in added)


def test_each_direction_takes_the_time_of_its_own_bytes():
    name, sizes, options = MODELS["gpt"]
    work = aq.zoo.build(aq.zoo.configure(name, **sizes), 16, **options)
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=4, schedule="1f1b")
    plan = aq.plan(
        work.train_step, work.state, work.batch, cluster=aq.Cluster.preset("2xcpu"), method=method
    )
    crossing = apply_plan(plan, capture(work.train_step, work.state, work.batch)).staged.crossing
    assert staged("gpt", 4).crossing.forward_bytes != staged("gpt", 4).crossing.backward_bytes
    first = plan.stages[0].prediction
    link = aq.Cluster.preset("2xcpu").transfer_links[0]
    for seconds, num_bytes in (
        (first.transfer_s, crossing.forward_bytes[0]),
        (first.transfer_back_s, crossing.backward_bytes[0]),
    ):
        assert seconds == pytest.approx(link.latency_s + num_bytes / link.bandwidth_bytes_per_s)
