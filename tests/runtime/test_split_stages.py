"""Programs of stages: nothing is left out, no product is done twice, little is kept, and parameters
cross once a step.
"""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from graph.layered import ROWS, WIDTH, layered
from runtime.pipelines import build, staging

from aliquot import zoo
from aliquot.graph import capture, cut_layers, stage_layers
from aliquot.plans import TaskKind, make_schedule
from aliquot.runtime.compiled._hlo import find_collectives
from aliquot.runtime.pipeline import compile_pipeline, donated_values
from aliquot.runtime.pipeline._instructions import Run, Send
from aliquot.runtime.pipeline._stage_functions import Form
from aliquot.sharding import Part

MICRO_BATCHES = 4


def made(schedule="1f1b", sizes=(1, 1, 1, 1), first_layers=(0, 2, 3, 4), num_layers=4):
    graph = layered(num_layers)
    stages = stage_layers(graph, cut_layers(graph, layers="layers[*]"), first_layers)
    return build(
        graph, stages, sizes=sizes, micro_batches=MICRO_BATCHES, schedule=schedule
    ).runner.pipeline


@pytest.fixture(scope="module")
def pipeline():
    return made()


@pytest.fixture(scope="module")
def grouped():
    """Two stages on two devices each, compiled."""
    return compile_pipeline(made(sizes=(2, 2), first_layers=(0, 2), num_layers=2))


def programs(pipeline, *parts):
    return [f.program for f in pipeline.functions if f.program.part in parts]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_every_operator_runs_and_every_product_once(schedule, pipeline):
    found = pipeline if schedule == "1f1b" else made(schedule)
    graph = found.graph
    times = Counter(k for p in (f.program for f in found.functions) for k in p.graph.body.items)
    # Operators whose results nobody reads are left out; the others reach the user's results.
    needed, live = {o.value for o in graph.outputs}, set()
    for k in reversed(graph.body.items):
        if needed.intersection(graph.ops[k].outputs):
            live.add(k)
            needed.update(i for i in graph.ops[k].inputs if isinstance(i, int))
    assert not [graph.ops[k].name for k in live if not times[k]]
    heavy = [k for k in live if graph.ops[k].name == "dot_general"]
    assert len(heavy) == 27 and {times[k] for k in heavy} == {1}
    parts = {f.program.part for f in found.functions}
    assert (Part.BACKWARD_WEIGHT in parts) == (schedule == "zero-bubble")


def test_the_stages_before_wait_for_no_gradient_of_weights():
    found = made("zero-bubble")
    names = {
        p.stage: [found.graph.ops[k].name for k in p.graph.body.items].count("dot_general")
        for p in programs(found, Part.BACKWARD_INPUT)
    }
    # One product for each weight on the way down; the first stage has nobody to send to, and so no
    # such program.
    assert names == {1: 2, 2: 2, 3: 3}


def test_only_products_are_kept_between_forward_and_backward(pipeline):
    """Of each layer the two products, or what is cheaper and holds as much: never the activations
    as well.
    """
    for program in programs(pipeline, Part.FORWARD):
        if program.stage in (1, 2):
            values = [pipeline.graph.values[v] for v in program.kept]
            assert len(values) == 1, values


@pytest.mark.parametrize(("recompute", "count"), [("none", 7), ("block", 0)])
def test_a_layer_of_gpt_keeps_its_products(recompute, count):
    """Queries, keys, values, scores, both products behind them and the wide one; with remat only
    what comes in.
    """
    sizes = {
        "num_layers": 3,
        "hidden_size": 8,
        "num_heads": 2,
        "ffn_size": 16,
        "vocab_size": 24,
        "seq_len": 4,
    }
    work = zoo.build(
        "gpt-125m", 4, overrides=sizes, dtype="float32", recompute=recompute, optimizer="sgd"
    )
    graph = capture(work.train_step, work.state, work.batch)
    stages = staging(graph, 3, layers=3)
    found = build(graph, stages, sizes=(1, 1, 1), micro_batches=2, schedule="1f1b").runner.pipeline
    (forward,) = [p for p in programs(found, Part.FORWARD) if p.stage == 1]
    (backward,) = [p for p in programs(found, Part.BACKWARD) if p.stage == 1]
    assert len(forward.kept) == count
    # Beside them what enters the layer, and the cotangent of what leaves it.
    assert len(backward.imports) == count + 2


def test_tied_parameters_and_their_gradients_cross_once_a_step(pipeline):
    graph, instructions = pipeline.graph, pipeline.instructions
    values = pipeline.contexts[0].parts.body.values
    (embed,) = [i for i in graph.inputs if i.path == "state.params.embed"]
    shape = graph.values[embed.value].shape
    sent = [
        (step.source, step.target, instructions.slots[slot][1], step.micro_batch)
        for step in instructions.steps
        if isinstance(step, Send)
        for slot in step.inputs
    ]
    assert [(a, b, m) for a, b, key, m in sent if key.value == embed.value] == [(0, 3, -1)]
    gradients = [
        (a, b, key.form, m)
        for a, b, key, m in sent
        if key.form in (Form.SENT, Form.LATE) and values[key.value].shape == shape
    ]
    assert gradients == [(3, 0, Form.LATE, -1)]


def test_micro_batches_cross_as_one_array_each_way(pipeline):
    sends = [s for s in pipeline.instructions.steps if isinstance(s, Send) and s.micro_batch >= 0]
    assert Counter((s.source, s.target) for s in sends) == {
        edge: MICRO_BATCHES for k in range(3) for edge in ((k, k + 1), (k + 1, k))
    }
    stream = ROWS // MICRO_BATCHES * WIDTH
    arrays = [pipeline.instructions.slots[slot][1].value for s in sends for slot in s.inputs]
    small = pipeline.contexts[0].plan.part.values
    assert {int(np.prod(small[v].shape)) for v in arrays} == {stream}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_no_more_micro_batches_are_in_flight_than_the_schedule_says(schedule):
    found = made(schedule)
    lists = make_schedule(schedule, 4, MICRO_BATCHES)
    for stage in range(4):
        alive, most = set(), 0
        for step in found.instructions.steps:
            slots = [(slot, *found.instructions.slots[slot]) for slot in step.outputs]
            forward = (
                isinstance(step, Run)
                and found.functions[step.function].program.part is Part.FORWARD
            )
            if forward and step.stage == stage:
                alive.update(
                    (slot, m) for slot, _, key, m in slots if key.value in kept(found, stage)
                )
            most = max(most, len({m for _, m in alive}))
            alive = {pair for pair in alive if pair[0] not in step.frees}
        assert most == lists.in_flight(stage, TaskKind.BACKWARD_WEIGHT), stage


def kept(pipeline, stage):
    return {v for p in programs(pipeline, Part.FORWARD) if p.stage == stage for v in p.kept}


def test_stats_count_what_is_in_flight(grouped):
    from aliquot.runtime.pipeline._pipeline_stats import pipeline_stats

    stages = pipeline_stats(grouped).stages
    lists = make_schedule("1f1b", 2, MICRO_BATCHES)
    assert [s.in_flight for s in stages] == [lists.in_flight(k) for k in range(2)]
    assert all(s.peak_bytes >= s.held_bytes > 0 for s in stages)


def test_no_device_waits_for_another_before_the_last_micro_batch(grouped):
    """Groups of devices that share the batch exchange gradients once a step, in the update."""
    updates = 0
    for stage in grouped.stages:
        found = find_collectives(stage.compiled.as_text(), ["x"], [2])
        if stage.function.program.part not in (Part.EARLY, Part.UPDATE):
            assert not found, (stage.function.program.name, found)
        elif stage.function.program.round == 0:
            updates += len(found)
    assert updates > 0


def test_stages_on_the_same_devices_share_what_is_compiled(monkeypatch):
    """Six stages on two submeshes. The first is the embedding alone, whose gradient the second
    works out.
    """
    calls, plain = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda lowered: calls.append(lowered) or plain(lowered)
    )
    interleaved = made("interleaved-1f1b", sizes=(1, 1), first_layers=range(6), num_layers=6)
    compiled = compile_pipeline(interleaved).stages
    forward, backward = (
        {c.function.program.stage: c.compiled for c in compiled if c.function.program.part is part}
        for part in (Part.FORWARD, Part.BACKWARD)
    )
    assert forward[1] is forward[3] and forward[2] is forward[4] and backward[2] is backward[4]
    # Nothing else is shared: neither what differs, nor what is equal on other devices.
    assert (len(set(map(id, forward.values()))), len(forward)) == (4, 6)
    assert (len(set(map(id, backward.values()))), len(backward)) == (4, 5)
    assert len(calls) == len({id(c.compiled) for c in compiled}) <= len(compiled) - 4


def test_results_of_the_pipeline_take_the_place_of_its_state(grouped):
    donated, graph = donated_values(grouped.pipeline), grouped.pipeline.graph
    arrays = [i for i in graph.inputs if i.output is not None and graph.values[i.value].shape]
    assert not [i.path for i in arrays if i.value not in donated]
