"""What takes memory: inputs for the whole step, and every stored array from its making to its last use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..graph import Phase, Role
from ._nodes import Resident

if TYPE_CHECKING:
    from ._naming import Naming

_CATEGORY_OF_ROLE = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.STATE: "other state",
    Role.BATCH: "batch",
    Role.OTHER: "other inputs",
}


def residents(naming: Naming) -> Iterator[Resident]:
    """All residents of a step. What replaces an input reuses its buffer and is not counted again."""
    cuts = naming.cuts
    graph, folding = cuts.graph, cuts.folding
    end = len(graph.ops)
    replacing = {graph.outputs[i.output].value for i in graph.inputs if i.output is not None}
    returned = {o.value for o in graph.outputs} - replacing
    role_of = {i.value: i for i in graph.inputs}
    for value_class, members in enumerate(folding.value_members):
        made = cuts.producer[value_class]
        value = graph.values[members[0]]
        if value.num_bytes == 0:
            continue
        if made is None:
            item = role_of.get(members[0])
            port = naming.class_port(value_class)
            yield Resident(
                node=port.node,
                projection=port.projection,
                num_bytes=value.num_bytes,
                category=_CATEGORY_OF_ROLE[item.role] if item else "constants",
                label=item.path if item else naming.label_of_value(value_class),
                births=np.zeros(len(members), np.int64),
                deaths=np.full(len(members), end, np.int64),
            )
            continue
        if not naming.storage.stored[value_class] or members[0] in replacing:
            continue
        landed = naming.landed_ports(value_class)
        port = landed[0] if landed else naming.class_port(value_class)
        births = np.array(folding.members[made[0]], np.int64)
        deaths = naming.storage.last_use[np.array(members)]
        if members[0] in returned:
            deaths = np.full(len(members), end, np.int64)
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=value.num_bytes,
            category=_category(naming, value_class),
            label=naming.label_of_value(value_class),
            births=births,
            deaths=np.maximum(deaths, births),
        )


def _category(naming: Naming, value_class: int) -> str:
    made = naming.cuts.producer[value_class]
    phase = naming.cuts.first[made[0]].phase if made is not None else Phase.PROLOGUE
    phases = naming.value_read_phases[value_class]
    if phase is Phase.BACKWARD and Phase.UPDATE in phases:
        return "gradients"
    if phase is Phase.FORWARD and Phase.BACKWARD in phases:
        return "activations"
    return "temporaries"
