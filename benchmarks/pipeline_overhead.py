"""How much time a pipeline takes beside its stages' programs, in one process.

On a machine whose virtual devices share the cores, stages cannot overlap: a step should take as
long as all its programs one after another. Both are measured in turn. The loop's own time is that
of a step whose programs and transfers are replaced by functions that do nothing.
"""

from __future__ import annotations

import statistics
import sys
import time

import _results

_results.use_eight_devices()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from aliquot import zoo  # noqa: E402
from aliquot.graph import capture, cut_layers, stage_layers  # noqa: E402
from aliquot.plans import make_schedule, schedule_kind  # noqa: E402
from aliquot.runtime import PipelineRunner, Step  # noqa: E402
from aliquot.runtime.pipeline._pipeline import build_pipeline  # noqa: E402
from aliquot.runtime.pipeline._stage_functions import StageSetup  # noqa: E402
from aliquot.sharding import Pins, cut_pipeline  # noqa: E402

BAR_RATIO, BAR_OWN_US = 1.05, 50
CASES = [("1f1b", 2, 4), ("1f1b", 4, 8), ("zero-bubble", 2, 4), ("gpipe", 2, 4)]
SIZES = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 512, "seq_len": 128}


def build(
    schedule: str, num_stages: int, num_micro_batches: int, sizes: dict
) -> tuple[Step, object, dict]:
    """A GPT as a pipeline with one device for each stage, its state and a batch."""
    work = zoo.build(
        zoo.configure("gpt-125m", **sizes), 4 * num_micro_batches, dtype="float32", recompute="none"
    )
    graph = capture(work.train_step, work.state, work.batch)
    layers = cut_layers(graph)
    staging = stage_layers(
        graph, layers, [round(k * len(layers) / num_stages) for k in range(num_stages)]
    )
    pins = Pins(
        by_class={},
        op_class=[-1] * len(graph.ops),
        inputs=((-1,),) * len(graph.inputs),
        outputs=((-1,),) * len(graph.outputs),
        values={},
    )
    setups = [
        StageSetup(
            mesh=Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,)),
            pins=pins,
            data_axes=(),
            given_specs={},
            sent_specs={},
        )
        for device in jax.devices()[:num_stages]
    ]
    tasks = make_schedule(schedule, num_stages, num_micro_batches, num_stages)
    splits = schedule_kind(schedule).splits_backward
    cut = cut_pipeline(
        graph, staging, [1] * num_stages, num_micro_batches=num_micro_batches, split_backward=splits
    )
    step = Step(
        graph.calling.fn, runner=PipelineRunner(graph, build_pipeline(graph, cut, setups, tasks))
    )
    random = np.random.default_rng(0)
    batch = {
        k: random.integers(0, sizes["vocab_size"], x.shape).astype(x.dtype)
        for k, x in work.batch.items()
    }
    return step, step.init(work.init, jax.random.key(0)), batch


def measure(step: Step, state: object, batch: dict, pairs: int) -> dict:
    """Seconds of steps, and of their programs one after another, in turn; and what the loop takes
    by itself.
    """
    state, _ = jax.block_until_ready(step(state, batch))
    compiled = step.runner.compiled()  # type: ignore[attr-defined]
    issuer = compiled.issuer
    actions = list(issuer._actions)
    stages = {id(s.compiled) for s in compiled.stages if s is not None}
    walls, sums = [], []
    seen: dict[int, object] = {}

    def alone(action):
        def call(*arrays):
            jax.block_until_ready(arrays)
            start = time.perf_counter()
            made = jax.block_until_ready(action.call(*arrays))
            busy[0] += (time.perf_counter() - start) * (id(action.call) in stages)
            seen[action.number] = made
            return made

        return call

    for _ in range(pairs):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        walls.append(time.perf_counter() - start)
        busy = [0.0]
        issuer._actions = [action._replace(call=alone(action)) for action in actions]
        state, _ = jax.block_until_ready(step(state, batch))
        issuer._actions = actions
        sums.append(busy[0])
    issuer._actions = [a._replace(call=lambda *_, made=seen[a.number]: made) for a in actions]
    own = []
    for _ in range(200):
        start = time.perf_counter()
        issuer._loop()
        own.append((time.perf_counter() - start) / len(actions) * 1e6)
    issuer._actions = actions
    return {
        "instructions": len(actions),
        "step ms": statistics.median(walls) * 1e3,
        "programs ms": statistics.median(sums) * 1e3,
        "ratio": statistics.median(w / s for w, s in zip(walls, sums, strict=True)),
        "own us per instruction": statistics.median(own),
    }


def main() -> int:
    """Measure and report."""
    chosen = _results.options(__doc__)
    rows = []
    sizes = SIZES | ({"num_layers": 2, "hidden_size": 32, "seq_len": 16} if chosen.quick else {})
    for schedule, num_stages, num_micro_batches in CASES[:1] if chosen.quick else CASES:
        case = {"schedule": schedule, "stages": num_stages, "micro-batches": num_micro_batches}
        _results.say(str(case))
        rows.append(
            case
            | measure(
                *build(schedule, num_stages, num_micro_batches, sizes), 3 if chosen.quick else 30
            )
        )
    report = _results.Report(
        name="pipeline_overhead",
        question="What does a pipeline take beside its programs?",
        bar=(
            f"a step <= {BAR_RATIO} x its programs' own times, our own Python <= {BAR_OWN_US} us"
            " per instruction"
        ),
        method=(
            "Medians of 30 pairs in turn after one step. Programs: each waited for before and"
            " after, transfers left out. Own Python: the loop over instructions with calls that"
            " return at once."
        ),
        summary={
            "largest ratio": max(row["ratio"] for row in rows),
            "most us per instruction": max(row["own us per instruction"] for row in rows),
        },
        tables={"pipelines": rows},
    )
    met = (
        report.summary["largest ratio"] <= BAR_RATIO
        and report.summary["most us per instruction"] <= BAR_OWN_US
    )
    return report.finish(chosen, met=None if chosen.quick else met)


if __name__ == "__main__":
    sys.exit(main())
