"""The plan of one step -> the plan of another that differs in scalars alone, as steps with another
schedule of the learning rate do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from ..core import PlanMismatchError
from ..cost import PlannedStep, encode_interior
from ..graph import Graph, graph_fingerprint, interface_fingerprint
from ..plans import ArrayInterface, Plan, unranged
from ..sharding import decide_alike
from ._apply import cut_as_planned
from ._write import array_interfaces, shardings_of


def carried_over(planned: PlannedStep, after: Graph) -> Plan:
    """The plan of a step, for another step with the same arrays and the same operators on them.

    Scalars, and what is computed of them, may differ: a counter that only one of the steps has, and
    figures that only one returns. All decisions stay, as do the predictions. New scalars lie where
    a plan of the other step has them.

    Args:
        after: the other step, on its whole batch.

    Raises:
        PlanMismatchError: the steps differ in more; lists every array that does.
        CaptureError, InputError: the other step cannot be cut as the plan says.
    """
    plan = planned.plan
    inputs, outputs = array_interfaces(after)
    faults = [
        *_other_arrays("input", plan.inputs, inputs),
        *_other_arrays("output", plan.outputs, outputs),
    ]
    on_missing_rule = planned.stages[0].problem.nodes.on_missing_rule
    cut = None if faults else cut_as_planned(plan, after, on_missing_rule)
    if cut is None or not all(
        decide_alike(stage.problem.nodes, problem.nodes)
        for stage, problem in zip(planned.stages, cut.problems, strict=True)
    ):
        raise PlanMismatchError(
            faults or ["other operators make its arrays"],
            asked=f"{after.name} differs from the planned step in more than scalars",
            advice="Make a plan for this step.",
        )
    decided = [
        (problem, own.choices, stage.axis_names)
        for problem, own, stage in zip(cut.problems, planned.stages, plan.stages, strict=True)
    ]
    shardings = shardings_of(after, decided, cut.staged)
    stages = []
    for stage, problem, own, (kept, returned) in zip(
        plan.stages, cut.problems, planned.stages, shardings, strict=True
    ):
        interior = encode_interior(problem.nodes, own.choices, stage.axis_names, own.repeat)
        stages.append(
            structs.replace(
                stage,
                # What the plan says counts, should somebody have edited it.
                shardings={path: stage.shardings.get(path, dims) for path, dims in kept.items()},
                outputs={path: stage.outputs.get(path, dims) for path, dims in returned.items()},
                interior=interior if stage.like is None else (),
            )
        )
    return structs.replace(
        plan,
        inputs=inputs,
        outputs=outputs,
        interface_fingerprint=interface_fingerprint(after),
        graph_fingerprint=graph_fingerprint(cut.graph),
        combine={unranged(path): how for path, how in cut.combine.items()},
        stages=tuple(stages),
    )


def _other_arrays(
    what: str, before: Sequence[ArrayInterface], after: Sequence[ArrayInterface]
) -> Iterator[str]:
    """A line for each array, scalars left out, that the steps do not have in common."""
    known, now = ({a.path: a for a in arrays if a.shape} for arrays in (before, after))
    for path in {**known, **now}:
        one, other = known.get(path), now.get(path)
        if one is None or other is None:
            yield f"only the {'planned' if one else 'other'} step has the {what} `{path}`"
        elif one != other:
            forms = (f"{a.dtype}{list(a.shape)} in {a.memory} memory" for a in (one, other))
            yield f"{what} `{path}` is planned as {', and is '.join(forms)}"
