"""The plan of one step -> the plan of another that differs in scalars alone, as steps with another
schedule of the learning rate do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from ..core import PlanMismatchError
from ..cost import encode_interior
from ..graph import Graph, graph_fingerprint, interface_fingerprint
from ..plans import ArrayInterface, Plan, unranged
from ..sharding import decide_alike
from ._apply import apply_plan, cut_as_planned
from ._write import array_interfaces, shardings_of


def carried_over(plan: Plan, before: Graph, after: Graph, on_missing_rule: str = "infer") -> Plan:
    """The plan of a step, for another step with the same arrays and the same operators on them.

    Scalars, and what is computed of them, may differ: a counter that only one of the steps has, and
    figures that only one returns. All decisions stay, as do the predictions. New scalars lie where
    a plan of the other step has them.

    Args:
        before: the step that the plan was made for, on its whole batch.
        after: the other step.

    Raises:
        PlanMismatchError: the plan is not for `before`, or the steps differ in more; lists every
            array that does.
    """
    planned = apply_plan(plan, before, on_missing_rule)
    old, new = array_interfaces(before), array_interfaces(after)
    faults = []
    for what, mine, theirs in zip(("input", "output"), old, new, strict=True):
        faults += _other_arrays(what, mine, theirs)
    cut = None if faults else cut_as_planned(plan, after, on_missing_rule)
    if cut is None or not all(
        decide_alike(stage.problem.nodes, problem.nodes)
        for stage, problem in zip(planned.stages, cut.problems, strict=True)
    ):
        raise PlanMismatchError(
            faults or ["its operators on arrays are others"],
            asked=f"{after.name} differs from the planned step in more than scalars",
            advice="Make a plan for this step.",
        )
    decided = [
        (problem, own.choices, stage.axis_names)
        for problem, own, stage in zip(cut.problems, planned.stages, plan.stages, strict=True)
    ]
    shardings = shardings_of(after, decided, cut.staged)
    stages = []
    for stage, problem, own, (inputs, outputs) in zip(
        plan.stages, cut.problems, planned.stages, shardings, strict=True
    ):
        interior = encode_interior(problem.nodes, own.choices, stage.axis_names, own.repeat)
        stages.append(
            structs.replace(
                stage,
                # What the plan says counts, should somebody have edited it.
                shardings={path: stage.shardings.get(path, dims) for path, dims in inputs.items()},
                outputs={path: stage.outputs.get(path, dims) for path, dims in outputs.items()},
                interior=interior if stage.like is None else (),
            )
        )
    return structs.replace(
        plan,
        inputs=new[0],
        outputs=new[1],
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
