"""Steps under plans, for tests of the runtime: by a method, or by hand with groups of devices that
share the batch.
"""

from __future__ import annotations

from typing import Any

from aliquot.cluster import Cluster
from aliquot.cost import PlannedStep, make_problem
from aliquot.graph import Graph, Role, capture
from aliquot.planners import Task, write_plan
from aliquot.plans import ModelReference
from aliquot.runtime import ProgramRunner, Step, build_program, make_mesh, place
from aliquot.sharding import Pins, plan_micro_batches, trace_part


def parallel(
    fn: Any,
    *args: Any,
    method: Any,
    num_micro_batches: int = 1,
    semantics: str = "exact",
    **kwargs: Any,
):
    """The step of a plan for eight CPU devices."""
    graph = capture(fn, *args, **kwargs)
    return build(graph, method, num_micro_batches, semantics)


def build(
    graph: Graph,
    method: Any,
    num_micro_batches: int = 1,
    semantics: str = "exact",
    devices: Any = None,
):
    """The same for a captured step."""
    small = graph if num_micro_batches == 1 else trace_part(graph, num_micro_batches)
    cluster = Cluster.preset("8xcpu")
    problem = make_problem(small, cluster, num_micro_batches=num_micro_batches)
    plan = write_plan(
        method.solve(problem),
        Task(
            graph=graph, cluster=cluster, num_micro_batches=num_micro_batches, semantics=semantics
        ),
        model=ModelReference(kind="closure", name=graph.name),
        version="0",
        trace_s=0.0,
        search_s=0.0,
    )
    planned = PlannedStep.of_program(plan, graph, problem)
    return Step(graph.calling.fn, plan=plan, runner=ProgramRunner.build(planned, devices))


def loop_results(
    graph: Graph, leaves: Any, *, num_micro_batches: int, groups: int = 1, semantics: str = "exact"
) -> list[Any]:
    """Flat results of a step in micro-batches, with `groups` devices that share the batch and
    nothing else split.
    """
    mesh = make_mesh((groups,), ("x",))
    batch = (0,) if groups > 1 else (-1,)
    pins = Pins(
        by_class={},
        op_class=[0] * len(graph.ops),
        inputs=tuple(batch if i.role is Role.BATCH else (-1,) for i in graph.inputs),
        outputs=((-1,),) * len(graph.outputs),
        values={},
    )
    plan = plan_micro_batches(graph, num_micro_batches, num_groups=groups, semantics=semantics)
    program = build_program(
        graph, pins, mesh, micro_batches=plan, data_axes=("x",) if groups > 1 else ()
    )
    copies = [
        place(leaf, sharding, leaf.shape, keep=True)
        for leaf, sharding in zip(leaves, program.in_shardings, strict=True)
    ]
    return list(program.jitted(*copies))
