"""Edges of the node graph: every place where an array may change its split."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from jax.lax import GatherScatterMode
from numpy.typing import NDArray

from ..cluster import Target
from ..graph import Phase, Role, wildcard
from ._ids import NodeId
from ._node_index import (
    adds,
    adds_or_transposes,
    adds_transposes_or_casts,
    classes_of_casts,
)
from ._nodes import Edge, Port

if TYPE_CHECKING:
    from ._node_index import NodeIndex


class _Conversion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An array that may change its split on its way; fields that have no explanation are those of
    its `Edge`.

    Attributes:
        value_class: of the array.
        copies: numbers of the values of this class that are read.
        region: of the operator that reads or makes it.
        shared_as: key under which it shares conversions; by default that of its class.
    """

    value_class: int
    count: float
    copies: frozenset[int]
    phase: Phase
    region: int
    gradient: bool
    kind: str
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    deferrable: bool = False
    over_tokens: bool = False
    label: str = ""
    shared_as: Hashable = None


@dataclass(slots=True, kw_only=True)
class EdgeBuilder:
    """Collects edges; conversions of one array for several users get one share number.
    `of_examples` are those along which arrays hold examples, by index.
    """

    naming: NodeIndex
    target: Target
    sums_gradients: bool
    passes_apart: bool
    edges: list[Edge] = field(default_factory=list)
    of_examples: set[int] = field(default_factory=set)
    _shares: dict[Hashable, int] = field(default_factory=dict)
    _known: dict[Hashable, int] = field(default_factory=dict)
    _parameters_of: dict[NodeId, list[str]] = field(default_factory=dict)
    _copy: dict[object, int] = field(default_factory=dict)
    _casts: Mapping[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cuts = self.naming.cuts
        graph = cuts.graph
        self._casts = classes_of_casts(cuts)
        for members in cuts.folding.value_members:
            self._copy.update({v: number for number, v in enumerate(members)})
        for item in graph.inputs:
            if item.role is Role.PARAMETER and item.output is not None:
                node = self.naming.operand_port(graph.outputs[item.output].value).node
                paths = self._parameters_of.setdefault(node, [])
                if wildcard(item.path) not in paths:
                    paths.append(wildcard(item.path))

    def add_operator(self, op_class: int) -> None:
        """Add the edges into the operands of a product."""
        cuts = self.naming.cuts
        rule, op = cuts.rules[op_class], cuts.first[op_class]
        if not rule.contracts:
            return
        for position, value_class, count in cuts.operands(op_class):
            target = self.naming.product_port(op_class, rule.operands[position])
            readers = self._readers(op_class, position, value_class)
            copies = frozenset(
                self._copy[cuts.graph.ops[m].inputs[position]] for m in readers.tolist()
            )
            root, target = self._before_transposes(value_class, target)
            self._add(
                self.naming.class_port(root),
                target,
                _Conversion(
                    value_class=root,
                    count=count * op.trips,
                    copies=copies,
                    phase=op.phase,
                    region=op.region,
                    gradient=False,
                    kind="operand",
                    starts=readers,
                    ends=readers,
                    deferrable=op.deferrable,
                ),
            )

    def _before_transposes(self, value_class: int, target: Port) -> tuple[int, Port]:
        """The array of which a value is a transpose (the value itself if it is none), and the port
        in terms of that array's dims.

        Compilers convert an array once, and transpose the copies locally.
        """
        cuts = self.naming.cuts
        while (producer := cuts.producer[value_class]) is not None and cuts.first[
            producer[0]
        ].name == "transpose":
            op = cuts.first[producer[0]]
            sources = cuts.sources[producer[0]][0]
            root = next(iter(sources), -1)
            if (
                len(sources) != 1
                or cuts.operand_slot(producer[0], root) != cuts.home(root)
                or cuts.home(root) is None
            ):
                break
            order = op.params["permutation"]
            projection = tuple(order[dim] if dim >= 0 else dim for dim in target.projection)
            value_class, target = root, Port(node=target.node, projection=projection)
        return value_class, target

    def add_crossings(self) -> None:
        """Add the edges into slots other than an array's home: results of products, parameters that
        meet activations, gradients that have ended.
        """
        cuts = self.naming.cuts
        for key, slot in cuts.slots.by_key.items():
            if isinstance(key, int):
                continue
            kind, value_class = key[0], key[1]  # type: ignore[index]
            update = kind == "gradient" or (len(key) > 2 and key[2] == "update")  # type: ignore[arg-type, index]
            producer = cuts.producer[value_class]
            births = self._births(value_class)
            phase = cuts.first[producer[0]].phase if producer is not None else Phase.FORWARD
            if kind == "parameter" and phase is not Phase.UPDATE:
                phase = Phase.UPDATE if update else Phase.FORWARD
            target = self.naming.slot_port(slot)
            gradient = self.naming.is_gradient(key)
            parameters = self._parameters_of.get(target.node, ()) if gradient else ()
            more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
            self._add(
                self.naming.class_port(value_class),
                target,
                _Conversion(
                    value_class=value_class,
                    label=f"gradient of {parameters[0]}{more}" if parameters else "",
                    shared_as=self._sum_of(value_class) if kind == "landed" else None,
                    count=len(cuts.folding.value_members[value_class])
                    * cuts.times_made(value_class),
                    copies=frozenset(range(len(cuts.folding.value_members[value_class]))),
                    phase=phase,
                    region=cuts.first[producer[0]].region if producer is not None else 0,
                    gradient=gradient,
                    kind="result" if kind == "landed" else kind,
                    starts=births,
                    ends=births,
                    deferrable=producer is not None and cuts.first[producer[0]].deferrable,
                    over_tokens=gradient
                    and producer is not None
                    and producer[0] in self.naming.token_sums,
                ),
            )

    def _sum_of(self, value_class: int) -> Hashable:
        """Key of the sum of which a product's result is a term, if the compiler reduces the sum
        instead of its terms; otherwise None.

        Terms that are cast to the sum's dtype are reduced one by one before the cast, except where
        gradients wait for the last micro-batch as one running total. The key differs from that of
        the sum's own array, which may be converted again.
        """
        through = adds_transposes_or_casts if self.sums_gradients else adds_or_transposes
        total = self.naming.serves(value_class, through, ending=adds)
        is_reduced = self.target.merges_partial_sums and total != value_class
        return ("sum", total) if is_reduced else None

    def add_aliases(self) -> None:
        """Add the edges from arrays that the update makes to the inputs that they replace: both are
        one buffer.
        """
        cuts = self.naming.cuts
        graph = cuts.graph
        pairs: dict[tuple[int, int], list[int]] = {}
        labels: dict[tuple[int, int], str] = {}
        for item in graph.inputs:
            if item.output is None:
                continue
            successor = graph.outputs[item.output].value
            # A step may return an input unchanged; then there is nothing to convert.
            if isinstance(successor, int) and successor != item.value:
                pair = (
                    int(cuts.folding.value_class[successor]),
                    int(cuts.folding.value_class[item.value]),
                )
                pairs.setdefault(pair, []).append(successor)
                labels.setdefault(pair, f"new {wildcard(item.path)}")
        for (made_class, input_class), values in pairs.items():
            # The new array is converted at the end of the step, when its old buffer is no longer
            # read.
            ends = np.full(len(values), len(graph.ops) - 1, np.int64)
            self._add(
                self.naming.class_port(made_class),
                self.naming.class_port(input_class),
                _Conversion(
                    value_class=made_class,
                    label=labels[made_class, input_class],
                    count=len(values),
                    copies=frozenset(self._copy[v] for v in values),
                    phase=Phase.UPDATE,
                    region=0,
                    gradient=False,
                    kind="alias",
                    starts=ends,
                    ends=ends,
                ),
            )

    def _add(self, source: Port, target: Port, way: _Conversion) -> None:
        """Add an edge. None is added if nothing is to be converted; an equal edge is widened
        instead.
        """
        if source.node < 0 or target.node < 0:
            return
        # An array is not converted if its reader has it in the same split whatever is chosen.
        if source.node == target.node and source.projection == target.projection:
            return
        value = self.naming.cuts.graph.values[
            self.naming.cuts.folding.value_members[way.value_class][0]
        ]
        producer = self.naming.cuts.producer[way.value_class]
        # The compiler merges equal conversions, also across forward and backward pass, into one,
        # unless these are programs of their own. Barriers around a remat region keep its
        # conversions apart from those outside. Other copies have conversions of their own.
        merged = (
            way.value_class if way.shared_as is None else way.shared_as,
            way.region > 0,
            float(way.count),
            way.copies,
            way.gradient,
            way.phase is Phase.UPDATE,
        )
        share_once = self._shares.setdefault(merged, len(self._shares))
        share = share_once
        if self.passes_apart and way.phase is Phase.BACKWARD:
            share = self._shares.setdefault((merged, way.phase), len(self._shares))
        # An alias is kept apart: it must not hide that the same conversion is needed before the
        # update.
        identity = (
            share,
            source.node,
            source.projection,
            target.node,
            target.projection,
            way.kind == "alias",
        )
        if identity in self._known:
            self._widen(self._known[identity], way.starts, way.ends, way.deferrable)
            return
        self._known[identity] = len(self.edges)
        if self.naming.cuts.batch_dims[way.value_class]:
            self.of_examples.add(len(self.edges))
        self.edges.append(
            Edge(
                index=len(self.edges),
                source=source.node,
                source_projection=source.projection,
                target=target.node,
                target_projection=target.projection,
                num_bytes=value.num_bytes,
                rank=len(value.shape),
                length=next(iter(value.shape), 1),
                dtype=value.dtype,
                count=float(way.count),
                share=share,
                share_once=share_once,
                phase=way.phase,
                gradient=way.gradient,
                label=way.label or self.naming.name_of_value(way.value_class),
                kind=way.kind,
                starts=way.starts,
                ends=way.ends,
                masked=self._is_masked(way.value_class),
                on_pieces=self.naming.on_pieces(way.value_class),
                deferrable=way.deferrable,
                parameter=self.naming.cuts.param_only[way.value_class],
                cast=producer is not None and producer[0] in self._casts,
                over_tokens=way.over_tokens,
                total_dtype=self.naming.total_dtype(way.value_class) if way.gradient else "",
            )
        )

    def _widen(
        self, index: int, starts: NDArray[np.int64], ends: NDArray[np.int64], deferrable: bool
    ) -> None:
        """Extend the live range of a conversion's result to cover that of an equal conversion."""
        edge = self.edges[index]
        if edge.deferrable and not deferrable:
            edge = dataclasses.replace(edge, deferrable=False)
        if len(edge.starts) == len(starts):
            edge = dataclasses.replace(
                edge, starts=np.minimum(edge.starts, starts), ends=np.maximum(edge.ends, ends)
            )
        self.edges[index] = edge

    def _is_masked(self, value_class: int) -> bool:
        """True if a value is the result of a lookup in which rows outside the table are filled."""
        producer = self.naming.cuts.producer[value_class]
        maker = self.naming.cuts.first[producer[0]] if producer is not None else None
        return (
            maker is not None
            and maker.name == "gather"
            and maker.params["mode"] == GatherScatterMode.FILL_OR_DROP
        )

    def _births(self, value_class: int) -> NDArray[np.int64]:
        """The operator that makes each copy of a value; 0 for inputs."""
        cuts = self.naming.cuts
        producer = cuts.producer[value_class]
        if producer is None:
            return np.zeros(len(cuts.folding.value_members[value_class]), np.int64)
        return np.array(cuts.folding.members[producer[0]], np.int64)

    def _readers(self, op_class: int, position: int, value_class: int) -> NDArray[np.int64]:
        """The copies of an operator class that read this value class at this position."""
        cuts = self.naming.cuts
        members = np.array(cuts.folding.members[op_class], np.int64)
        if len(cuts.sources[op_class][position]) == 1:
            return members
        ops, classes = cuts.graph.ops, cuts.folding.value_class
        return np.array(
            [
                m
                for m in members.tolist()
                if isinstance(read := ops[m].inputs[position], int) and classes[read] == value_class
            ],
            np.int64,
        )
