"""Segments of the zoo's models, their programs measured on virtual devices, and whole steps
composed of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ordinary_steps import step_of

from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.core import InputError
from aliquot.cost import make_problem
from aliquot.graph import capture
from aliquot.planners import ILP
from aliquot.profiling import (
    MeasuredStep,
    Measurement,
    ProfileDatabase,
    Timing,
    all_conversions,
    compile_conversion,
    compile_part,
    compose,
    conversions_between,
    describe_blocks,
    measure_in_turn,
    measured_step,
    priced_combinations,
    program_key,
    segment_step,
    time_part,
)
from aliquot.runtime import compiled_stats


def problem_of(model: str, num_layers: int, cluster: Cluster | None = None, **options: object):
    overrides = {"num_layers": num_layers}
    if model == "tiny":
        model, overrides = (
            "gpt-10m",
            {"num_layers": num_layers, "hidden_size": 32, "num_heads": 4, "seq_len": 16},
        )
    workload = zoo.build(model, 8, overrides=overrides, **options)
    graph = capture(workload.train_step, workload.state, workload.batch)
    return make_problem(graph, cluster or Cluster.preset("4xH100"))


@functools.cache
def segmented(model: str, num_layers: int, cluster: Cluster | None = None, **options: object):
    """A step over four devices in segments, which several tests ask for."""
    return segment_step(problem_of(model, num_layers, cluster, **options), (4,))


@pytest.mark.parametrize(
    ("model", "programs", "recompute"),
    [
        pytest.param(model, programs, each, marks=() if each == quick else pytest.mark.slow)
        for model, programs, quick in (
            ("gpt-10m", [1, 81, 3], "block"),
            ("llama-7b", [1, 81, 3], "none"),
            ("bert-base", [1, 81, 9], "block"),
            ("moe-380m", [1, 108, 81, 3], "none"),
        )
        for each in ("none", "block")
    ],
)
def test_the_number_of_programs_does_not_depend_on_depth(model, programs, recompute):
    for num_layers in (2, 4):
        step = segmented(model, num_layers, recompute=recompute)
        assert [math.prod(len(block) for block in kind.blocks) for kind in step.kinds] == programs
        assert step.num_programs == sum(programs)
        assert sum(step.kinds[k].count for k in range(1, len(programs) - 1)) == num_layers


@pytest.mark.parametrize(
    ("step", "programs", "counts"),
    [
        # Nothing comes before the first block, so the step begins with a segment.
        ("perceptron", [9, 3], [6, 1]),
        ("perceptron, norm and bias", [1, 9, 3], [1, 4, 1]),
        ("attention", [1, 81, 3], [1, 4, 1]),
        ("one layer", [1, 81, 3], [1, 1, 1]),
        ("loop over perceptrons", [27], [1]),
        # Two layers of two blocks each are one segment with two distinct blocks.
        ("experts", [12, 3], [2, 1]),
        ("autoencoder", [81], [1]),
        ("shared layer", [1, 81, 3], [1, 4, 1]),
    ],
)
def test_ordinary_steps_have_segments(step, programs, counts):
    problem = make_problem(capture(*step_of(step)), Cluster.preset("8xA100-40GB"))
    found = segment_step(problem, (8,))
    assert [math.prod(len(block) for block in kind.blocks) for kind in found.kinds] == programs
    assert (
        [kind.count for kind in found.kinds]
        == counts
        == [found.sequence.count(k) for k in range(len(counts))]
    )
    assert describe_blocks(found)["outside"] == []
    for k, kind in enumerate(found.kinds):
        assert [b.choices for b in kind.blocks] == [
            found.blocks[b].choices for b in found.blocks_of(k)
        ]


def test_a_step_that_begins_with_a_segment_is_composed():
    problem = make_problem(capture(*step_of("perceptron")), Cluster.preset("8xA100-40GB"))
    step = segment_step(problem, (8,))
    (best,) = compose(step, priced_combinations(step), most=1)
    least = ILP().solve(problem, step.space, memory_limit_bytes=problem.memory_limit_bytes)
    assert step.whole(best.options).step_time_s <= 1.02 * least.step_time_s


def test_a_segment_that_has_other_blocks_alone_is_refused(monkeypatch):
    problem = make_problem(capture(*step_of("perceptron")), Cluster.preset("8xA100-40GB"))
    monkeypatch.setattr("aliquot.profiling._segments.entry_operators", lambda *_: [])
    with pytest.raises(InputError, match="begins no block there.*--method blocks"):
        segment_step(problem, (8,))


@pytest.mark.parametrize("num_layers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_encoder_and_a_decoder_have_segments_of_their_own(num_layers):
    """The decoder's layers, of seven blocks, end in the middle of segments; those at its two ends
    have kinds of their own.
    """
    step = segmented("t5-770m", num_layers)
    assert [math.prod(len(block) for block in kind.blocks) for kind in step.kinds] == [
        1,
        81,
        243,
        81,
        27,
        27,
    ]
    assert [kind.count for kind in step.kinds] == [
        1,
        num_layers,
        1,
        num_layers - 1,
        num_layers - 1,
        1,
    ]
    assert step.num_programs == 460


def test_described_programs_are_those_to_measure():
    """Also of a scanned decoder, of which only the most promising combinations are measured."""
    step = segmented("t5-770m", 2, scan=True)
    assert any(kind.num_combinations < math.prod(map(len, kind.blocks)) for kind in step.kinds)
    described = describe_blocks(step)
    programs = [kind["programs"] for kind in described["segments"]["kinds"]]
    assert sum(programs) == described["num_programs"] == step.num_programs


def test_no_segment_ends_inside_the_attention_of_a_layer():
    segments = segmented("t5-770m", 2).segments
    assert segments.kinds == ((0, 1, 2, 3), (4, 5, 6, 7, 8), (9, 10, 4, 5), (6, 7, 8), (9, 10, 11))
    assert segments.sequence == (0, 0, 1, 2, 3, 4)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_composed_are_as_good_as_the_integer_program():
    # Segments are added up, while what runs beside compute depends on the whole step.
    cluster = Cluster.preset("4xV100-16GB")
    alone = replace(cluster.device, calibration={"overlap_fraction": 0.0})
    step = segmented("t5-770m", 2, replace(cluster, device=alone))
    (best,) = compose(step, priced_combinations(step), most=1)
    whole = step.whole(best.options)
    least = ILP().solve(
        step.problem, step.space, memory_limit_bytes=step.problem.memory_limit_bytes
    )
    assert best.seconds == pytest.approx(whole.step_time_s, rel=0.01)
    assert least.step_time_s * (1 - 1e-3) <= whole.step_time_s <= least.step_time_s * 1.002


def test_the_blocks_of_a_segment_are_those_of_the_step():
    step = segmented("moe-380m", 4)
    for k, kind in enumerate(step.kinds):
        for own, whole in zip(kind.blocks, step.blocks_of(k), strict=True):
            assert own.choices == step.blocks[whole].choices
            nodes, of_step = kind.problem.nodes.nodes, step.problem.nodes.nodes
            assert [f.size for f in nodes[own.block.entry].factors] == [
                f.size for f in of_step[step.blocks[whole].block.entry].factors
            ]


def test_a_loop_over_layers_is_one_segment_however_many_blocks_it_has():
    """The decoder's layer has seven blocks, and a pair of layers with experts eight: the most
    promising combinations count.
    """
    step = segmented("t5-770m", 4, scan=True)
    assert [[len(block) for block in kind.blocks] for kind in step.kinds] == [
        [],
        [3] * 4,
        [3] * 7,
        [3],
    ]
    assert step.num_programs == 1 + 81 + 243 + 3
    pairs = segmented("moe-380m", 4, scan=True, recompute="none")
    assert [len(kind.blocks) for kind in pairs.kinds] == [
        0,
        8,
        1,
    ] and pairs.num_programs == 1 + 243 + 3


def test_of_very_many_combinations_the_most_promising_are_found(monkeypatch):
    step = segmented("gpt-350m", 2)
    (kind,) = [kind for kind in step.kinds if len(kind.blocks) == 4]
    every = sorted(c.seconds for c in kind.promising())
    assert len(every) == 81
    for most in (1, 10, 40):
        monkeypatch.setattr("aliquot.profiling._segments._MOST", most)
        found = [c.seconds for c in kind.promising()]
        hopeful = [seconds for seconds in every if seconds <= 1.5 * every[0]][:most]
        assert found == sorted(found) and found[0] == pytest.approx(every[0], rel=2e-3)
        # A bound lies a little below its combination, so that those at the end of the list may
        # change places.
        np.testing.assert_allclose(found[: len(hopeful)], hopeful, rtol=0.02)


@pytest.mark.parametrize("model", ["gpt-350m", pytest.param("moe-380m", marks=pytest.mark.slow)])
def test_the_best_composed_step_is_among_the_best_of_whole_steps(model):
    step = segmented(model, 4)
    combinations = [
        [c for o in kind.combinations() if (c := kind.combination(o))] for kind in step.kinds
    ]
    best = compose(step, combinations, most=20)
    assert [c.seconds for c in best] == sorted(c.seconds for c in best)
    whole = [step.whole(c.options) for c in best]
    assert (
        np.median([abs(c.seconds / w.step_time_s - 1) for c, w in zip(best, whole, strict=True)])
        < 0.05
    )
    assert whole[0].step_time_s <= min(w.step_time_s for w in whole) * 1.02


def test_composing_finds_what_trying_everything_finds():
    step = segmented("tiny", 3)
    rng = np.random.default_rng(0)
    combinations = [
        [c for o in kind.combinations() if (c := kind.combination(o))] for kind in step.kinds
    ]
    kinds = tuple({c.options: float(rng.uniform(1, 2)) for c in some} for some in combinations)
    # Half of the conversions are known.
    found = all_conversions(step, combinations)[1:]
    conversions = {conversion: float(rng.uniform(0.5, 1)) for conversion in found[::2]}
    assert len(conversions) >= 3
    launch_s = 0.25
    measured = MeasuredStep(kinds=kinds, conversions=conversions, launch_s=launch_s)
    totals = {}
    for chosen in itertools.product(*combinations):
        (one,) = compose(step, [[c] for c in chosen], measured)
        own = launch_s + sum(
            k.count * (m[c.options] - launch_s)
            for k, m, c in zip(step.kinds, kinds, chosen, strict=True)
        )
        for a, b in itertools.pairwise(step.sequence):
            needed = [
                conversion
                for _, conversion in conversions_between(step.crossings[a, b], chosen[a], chosen[b])
            ]
            own += sum(conversions[n] - launch_s for n in needed if n in conversions)
        assert one.seconds >= own * (1 - 1e-12)
        assert one.measured_share == pytest.approx(own / one.seconds)
        totals[one.options] = one
    for limit in (math.inf, float(np.median([c.memory_bytes for c in totals.values()]))):
        fitting = [c for c in totals.values() if c.memory_bytes <= limit]
        (best,) = compose(step, combinations, measured, memory_limit_bytes=limit, most=1)
        assert best.seconds == pytest.approx(min(c.seconds for c in fitting))
    assert compose(step, combinations, measured, memory_limit_bytes=1.0) == []


def test_what_was_not_measured_is_corrected_by_what_was(tmp_path):
    """A model that is too optimistic by half must not prefer what nobody has measured."""
    step = segmented("tiny", 2)
    combinations = priced_combinations(step)
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        for kind, some in zip(step.kinds, combinations, strict=True):
            for c in some[: len(some) // 2 + 1]:
                key = program_key(kind.problem.graph, c.choices, (4,))
                database.put(key, Measurement(seconds=2 * c.seconds))
        measured = measured_step(step, combinations, database)
    assert measured.corrections == pytest.approx([2.0] * len(step.kinds))
    for chosen in ([some[0] for some in combinations], [some[-1] for some in combinations]):
        alone = [[c] for c in chosen]
        (modelled,), (corrected,) = (compose(step, alone, m) for m in (None, measured))
        segments_s = sum(k.count * c.seconds for k, c in zip(step.kinds, chosen, strict=True))
        assert corrected.seconds == pytest.approx(modelled.seconds + segments_s)
    assert combinations[1][-1].options not in measured.kinds[1]


def test_segments_run_and_are_measured_once_each():
    cluster = Cluster.detect(jax.devices()[:4])
    step = segmented("tiny", 2, cluster, dtype="float32")
    kind = step.kinds[1]
    some = [kind.combination(options) for options in [(0, 0, 0, 0), (2, 1, 2, 1)]]
    parts = [
        lambda c=c: compile_part(
            kind.problem, c.choices, step.mesh.shape, step.mesh.axis_names, label=str(c.options)
        )
        for c in some
    ]
    found = list(
        measure_in_turn(
            parts,
            lambda part: time_part(part, Timing(warm_up=1, repeats=3, least_s=0.0, retries=0)),
        )
    )
    assert [m.label for m in found] == [str(c.options) for c in some]
    assert all(
        m.outcome == "ok" and m.seconds > 0 and m.memory_bytes > 0 and m.repeats == 3 for m in found
    )
    keys = {program_key(kind.problem.graph, c.choices, step.mesh.shape) for c in some}
    assert len(keys) == 2 and all(k.device.endswith("cores") for k in keys)
    assert program_key(kind.problem.graph, some[0].choices, (4,)) in keys


def test_what_crosses_is_converted_as_it_says():
    """From one split to another, and forward and backward; the launch of a program comes first."""
    step = segmented("tiny", 2)
    combinations = priced_combinations(step)
    found = all_conversions(step, combinations)
    assert len(found) == len(set(found)) >= 8
    launch, *conversions = found
    jax_names = step.mesh.axis_names
    part = compile_conversion(launch, (4,), jax_names)
    assert part.label == "launch of a program" and part.compiled(jnp.float32(1)) == 2
    kinds = {"all-gather": 0, "all-to-all": 0}
    for conversion in conversions:
        part = compile_conversion(conversion, (4,), jax_names)
        values = jax.device_put(
            np.arange(math.prod(conversion.shape), dtype=conversion.dtype).reshape(conversion.shape)
        )
        result = part.compiled(jax.device_put(values, part.arguments[0].sharding))
        assert (np.asarray(result) == np.asarray(values)).all()
        assert part.arguments[0].sharding.is_equivalent_to(result.sharding, values.ndim) is False
        for c in compiled_stats(part.compiled, jax_names, (4,)).collectives:
            kinds[c.kind] += 1
    assert kinds["all-gather"] and kinds["all-to-all"]


def test_a_hopeless_program_is_not_repeated():
    cluster = Cluster.detect(jax.devices()[:4])
    step = segmented("tiny", 2, cluster, dtype="float32")
    kind = step.kinds[0]
    (c,) = [kind.combination(options) for options in kind.combinations()]
    part = compile_part(kind.problem, c.choices, step.mesh.shape, step.mesh.axis_names)
    found = time_part(part, best_s=1e-9)
    assert found.outcome == "stopped early" and found.repeats == 1 and found.seconds > 0
    lost = time_part(replace(part, compiled=None, memory_bytes=0.0, label="x"))
    assert lost == Measurement(seconds=None, repeats=0, outcome="out of memory", label="x")


def test_blocks_are_described_with_the_plans_of_every_product():
    answer = describe_blocks(segmented("moe-380m", 2))
    experts = next(b for b in answer["blocks"] if len(b["options"]) == 4)
    assert experts["options"] == ["expert on x", "batch on x", "contraction on x", "output on x"]
    for block in answer["blocks"]:
        assert all(len(product["plans"]) == len(block["options"]) for product in block["products"])
    first, second = [p for p in experts["products"] if p["phase"] == "forward"]
    # Megatron's way: what splits the first product's output splits the second's sum.
    assert (first["plans"][3], second["plans"][3]) == ("output on x", "contraction on x")
    # Attention multiplies two activations by heads, which no parameter has as experts do.
    attention = next(b for b in answer["blocks"] if b is not experts)
    plans = {plan for product in attention["products"] for plan in product["plans"]}
    assert "head on x" in plans and "expert on x" not in plans
    assert answer["segments"]["sequence"] == [0, 1, 2, 3]
