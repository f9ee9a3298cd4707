"""Pipelines through the compiler, stage by stage: what is verified is what runs."""

from dataclasses import replace

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.planners.inter._manual import ManualStages
from aliquot.runtime.pipeline._instructions import Instructions, Run
from aliquot.runtime.pipeline._stage_functions import Form, Key
from aliquot.runtime.pipeline._stage_memory import stage_memory


def train_step(params, batch):
    """Equal layers between a first and a last one that are different, and a norm that all stages
    must know.
    """

    def loss(params):
        x = batch["x"] @ params["first"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), params, grads), value


def arguments():
    shape = jax.ShapeDtypeStruct
    layers = [shape((64, 64), jnp.float32)] * 4
    params = {
        "first": shape((32, 64), jnp.float32),
        "layers": layers,
        "last": shape((64, 8), jnp.float32),
    }
    return params, {"x": shape((64, 32), jnp.float32), "y": shape((64, 8), jnp.float32)}


def totals(collectives):
    found = {}
    for each in collectives:
        count, num_bytes = found.get((each.kind, each.axes), (0, 0))
        found[each.kind, each.axes] = count + each.count, num_bytes + each.num_bytes
    return found


def test_verified_programs_are_those_that_run(tmp_path):
    boundaries = ((0, 1), (1, 2), (2, 3), (3, 4))
    inter = ManualStages(
        boundaries=boundaries,
        options=("dp2 tp2",) * 4,
        schedule="interleaved-1f1b",
        num_submeshes=2,
    )
    plan = aq.plan(
        train_step,
        *arguments(),
        cluster=Cluster.preset("8xcpu"),
        method=aq.PipeshardParallel(inter=inter, num_micro_batches=4),
    )
    lines = []
    found = aq.verify(plan, train_step, *arguments(), cache=tmp_path, progress=lines.append)
    here = aq.parallelize(train_step, plan).prepare(*arguments()).stats()
    for stage, predicted, running in zip(found.stages, plan.stages, here.stages, strict=True):
        assert stage.compiled_bytes == running.peak_bytes == sum(stage.held.values()) > 0
        assert totals(stage.compiled.collectives) == totals(running.collectives)
        assert stage.predicted_bytes == predicted.prediction.peak_memory_bytes
        assert 0 < stage.argument_bytes <= stage.held["arguments"]
        assert {p.name.removeprefix(f"stage {running.stage} "): p.runs for p in stage.programs} == {
            "forward": 4,
            "backward": 4,
            "update 0": 1,
            "update 1": 1,
        }
    # The second stage and the third are equal but for their devices.
    same = {p.name: p.same_as for stage in found.stages for p in stage.programs if p.same_as}
    assert len(same) == 4 and {name[:7] for pair in same.items() for name in pair} == {
        "stage 1",
        "stage 2",
    }
    assert len({line.partition(" (")[0] for line in lines if line.startswith("compiling")}) == 12
    # Stages take turns on their devices, which hold something of each at any moment.
    together = [[0, 2], [1, 3]]
    for stages, num_bytes in zip(together, found.submesh_bytes, strict=True):
        alone = [found.stages[k].compiled_bytes for k in stages]
        assert max(alone) < num_bytes <= sum(alone)
    assert found.fits and not replace(found, limit_bytes=max(found.submesh_bytes) - 1).fits
    told = found.to_dict()["stages"][0]
    assert told["parts"]["compiled"] == {
        **found.stages[0].held,
        "peak": found.stages[0].compiled_bytes,
    }


def test_the_moment_when_devices_hold_most():
    """A forward and a backward program for two micro-batches, state of 100 bytes that the update
    replaces in its place, a batch of 7.
    """
    state, new = (0, Key(Form.GIVEN, 0), -1), (0, Key(Form.LATE, 3), -1)
    left = [(0, Key(Form.LOCAL, 1), m) for m in (0, 1)]
    total = (0, Key(Form.TOTAL, 2), -1)
    slots = (state, *left, total, new, (0, Key(Form.GIVEN, 4), -1))

    def run(function, micro_batch, inputs, outputs, frees):
        return Run(
            function=function,
            stage=0,
            micro_batch=micro_batch,
            inputs=inputs,
            outputs=outputs,
            frees=frees,
        )

    instructions = Instructions(
        steps=(
            run(0, 0, (0, 5), (1,), ()),
            run(0, 1, (0, 5), (2,), (5,)),
            run(1, 0, (0, 1, 3), (3,), (1,)),
            run(1, 1, (0, 2, 3), (3,), (2,)),
            run(2, -1, (0, 3), (4,), (0, 3)),
        ),
        slots=slots,
        given={0: {0: 0, 4: 5}},
        zeros={0: {2: 3}},
        numbers={},
        results={(0, 3): 4},
    )
    found = stage_memory(
        instructions,
        [0],
        sizes={0: 100, 1: 10, 2: 10, 3: 50, 4: 100, 5: 7},
        temps={0: 1, 1: 5, 2: 2},
        aliases={1: 50, 2: 100},
        donated={1: (2,), 2: (0,)},
    )
    assert (found.held_bytes, found.peak_bytes, found.in_flight) == (177, 182, 2)
    assert {kind: n for kind, n in found.parts.items() if n} == {
        "arguments": 107,
        "residuals": 20,
        "totals": 50,
        "temporaries": 5,
    }


def test_each_pass_of_a_stage_gathers_what_it_reads(tmp_path):
    """Programs of their own share no copies: where the sequence is split between products, what
    they read is gathered in the forward pass, and again for the gradients of weights.
    """

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for up, down in params:
                x = x + jnp.tanh(x @ up) @ down
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shape = jax.ShapeDtypeStruct
    params = [(shape((32, 64), jnp.float32), shape((64, 32), jnp.float32))] * 4
    batch = {name: shape((16, 16, 32), jnp.float32) for name in "xy"}
    plan = aq.plan(
        step,
        params,
        batch,
        cluster=Cluster.preset("8xcpu"),
        method=aq.Megatron(data=2, tensor=2, pipeline=2, sequence=True),
        num_micro_batches=4,
    )
    found = aq.verify(plan, step, params, batch, cache=tmp_path)
    first, last = (
        next(c for c in stage.collectives if c.kind == "all-gather") for stage in found.stages
    )
    assert first.predicted_bytes == first.compiled_bytes > 0
    # The compiler gathers the error of the loss, too.
    assert 0.7 * last.compiled_bytes < last.predicted_bytes <= last.compiled_bytes
