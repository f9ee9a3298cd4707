"""A step that runs on its whole batch at once, cut like one that runs on micro-batches: body, then
update.
"""

from __future__ import annotations

from ...graph import NO_VALUE, Graph, Phase, items_of
from ._micro_batch_graphs import MicroBatchGraphs, subgraph


def phase_parts(graph: Graph) -> MicroBatchGraphs:
    """Graphs with the forward and backward pass as the body and the update as the late part;
    nothing runs early and nothing is sliced.
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
