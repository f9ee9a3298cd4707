"""Steps that are cut where their phases say: forward and backward pass as the body, then the
update.
"""

from __future__ import annotations

from ...graph import NO_VALUE, Graph, Phase, items_of
from ..micro_batches import MicroBatchPlan, Phased, TimeKind
from ._layout import Layout
from ._micro_batch_graphs import MicroBatchGraphs, cut_exactly, subgraph


def cut_graph(plan: MicroBatchPlan, layout: Layout) -> MicroBatchGraphs:
    """The three graphs of a plan, exact or independent."""
    return cut_exactly(plan, layout) if plan.phased is None else _own_parts(plan, plan.phased)


def _own_parts(plan: MicroBatchPlan, phased: Phased) -> MicroBatchGraphs:
    """Graphs of micro-batches that are steps of their own: the body as it is traced at their size,
    the update as it stands in the step.
    """
    given = [i.value for i in plan.whole.inputs]
    late = plan.part if phased.late_of_part else plan.whole
    body = [plan.part.body.items[k] for k in phased.body]
    return MicroBatchGraphs(
        early=subgraph(plan.whole, given, [], []),
        body=subgraph(plan.part, given, body, phased.crossing),
        late=subgraph(
            late,
            [*given, *phased.crossing],
            [late.body.items[k] for k in phased.late],
            [o.value for o in plan.whole.outputs],
        ),
        early_values=(),
        inside=(),
        sliced=tuple(
            (i.value, plan.specs[i.value].dim)
            for i in plan.whole.inputs
            if plan.specs[i.value].kind is TimeKind.CONCATENATE
        ),
        crossing=phased.crossing,
        group=NO_VALUE,
        micro_batch=NO_VALUE,
        handed_on=phased.handed_on,
    )


def phase_parts(graph: Graph) -> MicroBatchGraphs:
    """Graphs of a step that runs on its whole batch at once; nothing runs early, and nothing is
    sliced.
    """
    items = items_of(graph)
    given = [i.value for i in graph.inputs]
    body = [item for item in items if item.phase is not Phase.UPDATE]
    late = [item for item in items if item.phase is Phase.UPDATE]
    made_in_body = {o for item in body for o in item.outputs}
    wanted = {i for item in late for i in item.inputs} | {
        o.value for o in graph.outputs if isinstance(o.value, int)
    }
    crossing = sorted(made_in_body & wanted)
    return MicroBatchGraphs(
        early=subgraph(graph, given, [], []),
        body=subgraph(graph, given, [item.op_or_call for item in body], crossing),
        late=subgraph(
            graph,
            [*given, *crossing],
            [item.op_or_call for item in late],
            [o.value for o in graph.outputs],
        ),
        early_values=(),
        inside=(),
        sliced=(),
        crossing=tuple(crossing),
        group=NO_VALUE,
        micro_batch=NO_VALUE,
    )
