"""The choices that the nodes of one stage may take, given the degrees of its operators.

The mesh is factored so finely that each axis belongs, for every operator, either to its tensor
degree or to its data degree; ranks of one tensor group are neighbours, as in Megatron-LM. Products
and the arrays between them are split as their operators' degrees say. The residual stream, with the
norms and sums on it, is one array through the whole stage, so it has one split; in a chain of
convolutions, all arrays between two of them have one split. Other nodes (weights, optimizer state,
the backward pass) may take the splits that carry over from these.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...cost import Problem, can_split, enumerate_choices
from ...planners import kinds_of
from ...sharding import Choice, NodeId, Port, Projection
from ._configuration import StageConfiguration
from ._operator_map import OperatorMap
from ._products import (
    CONTRACTION,
    FEATURES,
    FILL_STREAM,
    HEADS,
    IMAGES,
    LAYER_STARTS,
    READ_STREAM,
    SPLIT_OF,
    STREAM,
    Product,
    products_of,
)

Ints = NDArray[np.int64]
_Neighbours: TypeAlias = dict[int, list[tuple[int, Projection, Projection]]]
_AFTER_SCORES = ("enc-attention-softmax", "enc-attention-dropout")
DATA, TENSOR, MIXED = "data", "tensor", "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The mesh of a stage, outermost axis first.

    Attributes:
        names, sizes: names and sizes of the axes.
        degrees: for each axis, the least tensor degree of the operators for which it is a tensor
            axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    degrees: tuple[int, ...]

    def is_tensor(self, axis: int, tensor: int) -> bool:
        """True if an axis is a tensor axis for operators of tensor degree `tensor`."""
        return tensor >= self.degrees[axis]


def mesh_axes(num_devices: int, tensor_degrees: Sequence[int]) -> Axes | None:
    """The coarsest mesh on which each of these tensor degrees is a product of axes; None if they do
    not divide each other.
    """
    steps = sorted({1, *tensor_degrees, num_devices})
    if any(b % a for a, b in itertools.pairwise(steps)):
        return None
    least, most = min(tensor_degrees), max(tensor_degrees)
    names, sizes, degrees = [], [], []
    for low, high in reversed(list(itertools.pairwise(steps))):
        # This axis is a tensor axis for operators whose tensor degree is `high` or more.
        kind = DATA if high > most else TENSOR if high <= least else MIXED
        names.append(kind)
        sizes.append(high // low)
        degrees.append(high)
    counts: Counter[str] = Counter()
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name}{counts[name]}")
    if not numbered:
        return Axes(names=(DATA,), sizes=(1,), degrees=(2,))
    return Axes(names=tuple(numbered), sizes=tuple(sizes), degrees=tuple(degrees))


@dataclass(slots=True, kw_only=True, eq=False)
class StageSplits:
    """Derives the choices of a stage from its configuration.

    Attributes:
        problem: the stage's problem.
        operators: the map of the step's operators.
        ops: for each operator of the stage, its number in the step.
        stage: its configuration.
        first: position of the chain's first operator in the stage.
        axes: axes of its mesh.
        faults: messages on degrees and algorithms that the model cannot have.
    """

    problem: Problem
    operators: OperatorMap
    ops: Sequence[int]
    stage: StageConfiguration
    first: int
    axes: Axes
    faults: list[str] = field(default_factory=list)
    _decided: dict[int, Choice] = field(default_factory=dict)
    _seeds: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))

    def choices(self) -> list[Ints]:
        """For each node, the choices that it may take. Degrees that cannot be met are added to
        `faults`.
        """
        products = products_of(self.problem, self.operators, self.ops)
        for product in products:
            self._decide_product(product)
        for product in products:
            if self.operators.roles[product.operators[0]] not in IMAGES:
                self._decide_arrays(product)
        self._decide_images(products)
        return self._allowed()

    def repeat(self) -> frozenset[NodeId]:
        """Nodes of the products that the backward pass may recompute."""
        names = self.operators.roles
        return frozenset(
            product.node
            for product in products_of(self.problem, self.operators, self.ops)
            if is_repeated(names, self.stage, self.first, product.operators[0] - self.first)
        )

    @property
    def has_images(self) -> bool:
        """True for a stage of a chain of convolutions."""
        return not {*IMAGES}.isdisjoint(self.operators.roles)

    def overruled(self) -> tuple[list[int], str]:
        """Operators whose data degree is not that of the arrays they work on, and the data degrees
        of these arrays, as text.
        """
        voters = self._image_voters(products_of(self.problem, self.operators, self.ops))
        if not voters:
            others = [
                o
                for o in self._mine()
                if self.operators.roles[o] in STREAM and self._degrees(o)[1] != self.stream_data
            ]
            return others, str(self.stream_data)
        taken, overruled = set[int](), list[int]()
        for _, _, operators in voters.values():
            degree = self._most_data(operators)
            other = [o for o in operators if self._degrees(o)[1] != degree]
            overruled += other
            taken |= {degree} if other else set()
        return sorted(overruled), " or ".join(map(str, sorted(taken)))

    @property
    def stream_data(self) -> int:
        """The data degree of the residual stream: that of most operators on it; in a tie, the
        largest.
        """
        on_stream = [o for o in self._mine() if self.operators.roles[o] in STREAM]
        return self._most_data(on_stream or self._mine())

    def _most_data(self, operators: Iterable[int]) -> int:
        """The most frequent data degree of some operators; in a tie, the largest."""
        counts = Counter(self._degrees(o)[1] for o in operators)
        return max(counts, key=lambda degree: (counts[degree], degree))

    def _mine(self) -> range:
        return range(self.first, self.first + len(self.stage.tensor))

    def _degrees(self, operator: int) -> tuple[int, int, int]:
        """Tensor degree, data degree and algorithm of an operator; for one of another stage, those
        of the nearest operator of this stage.
        """
        k = min(max(operator - self.first, 0), len(self.stage.tensor) - 1)
        return self.stage.tensor[k], self.stage.data[k], self.stage.algorithm[k]

    def _decide_product(self, product: Product) -> None:
        operator = product.operators[0]
        name = self.operators.roles[operator]
        tensor, _, algorithm = self._degrees(operator)
        kinds = SPLIT_OF[name]
        if algorithm >= max(len(kinds), 1):
            only = ", ".join(map(str, range(max(len(kinds), 1))))
            self._fault(operator, f"there is no algorithm {algorithm}, only {only}")
            return
        factor = next((f for f, kind in product.kinds.items() if kind in kinds[algorithm:][:1]), -1)
        self._decide(operator, product.node, product.batch, factor, tensor)

    def _decide_arrays(self, product: Product) -> None:
        """Decide the splits of the arrays that a product makes and reads."""
        operator = product.operators[0]
        name = self.operators.roles[operator]
        if product.landed is not None:
            shared = {FEATURES, HEADS}
            self._decide_array(
                product, name in FILL_STREAM, product.result, product.landed, shared, behind=True
            )
        for port, source in product.sources:
            shared = {HEADS} if HEADS in product.kinds.values() else {CONTRACTION}
            self._decide_array(product, name in READ_STREAM, port, source, shared, behind=False)

    def _decide_images(self, products: Sequence[Product]) -> None:
        """Decide the splits of the arrays between convolutions: over examples, and replicated
        within each tensor group.
        """
        for node, (operator, batch, operators) in self._image_voters(products).items():
            if node not in self._decided:
                data = self._most_data(operators)
                self._decide(operator, node, batch, -1, self.stage.num_devices // data)

    def _image_voters(
        self, products: Sequence[Product]
    ) -> dict[int, tuple[int, frozenset[int], list[int]]]:
        """For each node of arrays between convolutions: a convolution that makes or reads these
        arrays, the node's factors that count examples, and the operators that work on the arrays.
        """
        images = [p for p in products if self.operators.roles[p.operators[0]] in IMAGES]
        convolutions = sorted(itertools.chain(*(p.operators for p in images)))
        voters: dict[int, tuple[int, frozenset[int], list[int]]] = {}

        def vote(operator: int, node: int, operators: Iterable[int]) -> None:
            batch = self.problem.nodes.batch_factors[node]
            voters.setdefault(node, (operator, batch, []))[2].extend(operators)

        for product in images:
            for operator in product.operators:
                k = convolutions.index(operator)
                if product.landed is not None:
                    end = convolutions[k + 1] if k + 1 < len(convolutions) else self._mine().stop
                    vote(operator, product.landed.node, range(operator + 1, end))
        for product in images:
            for _, source in product.sources:
                # Only arrays that enter the stage are left; the operators before its first
                # convolution work on them.
                if source.node not in voters:
                    first = product.operators[0]
                    before = range(self.first, first) if first == convolutions[0] else ()
                    vote(first, source.node, before or (first,))
        return {node: (o, batch, mine or [o]) for node, (o, batch, mine) in voters.items()}

    def _decide_array(
        self,
        product: Product,
        on_stream: bool,
        port: Port,
        other: Port,
        shared: set[str],
        *,
        behind: bool,
    ) -> None:
        """Decide the split of an array that a product makes (`behind`) or reads: that of the
        residual stream if it is a part of it, else by the degrees of the neighbouring operator.
        """
        if other.node in self._decided:
            return
        batch = self.problem.nodes.batch_factors[other.node]
        operator = product.operators[0]
        name = self.operators.roles[operator]
        if on_stream:
            devices = self.stage.num_devices
            self._decide(operator, other.node, batch, -1, devices // self.stream_data)
            return
        # Between two products lie softmax or GELU, which have degrees of their own.
        if behind and name in ("enc-attention-score", "enc-MLP-GEMM-1"):
            operator += 1
        elif not behind:
            operator -= 2 if name == "enc-attention-context" else 1
        tensor, _, algorithm = self._degrees(operator)
        dims = [port.projection[f] for f, kind in product.kinds.items() if kind in shared]
        factor = next(
            (other.projection.index(d) for d in dims if d >= 0 and d in other.projection), -1
        )
        if behind and name == "enc-attention-qkv" and algorithm == 1:
            # Its result is summed over the tensor group, and so replicated there.
            factor = -1
        self._decide(operator, other.node, batch, factor, tensor)

    def _decide(
        self, operator: int, node: int, batch: frozenset[int], factor: int, tensor: int
    ) -> None:
        example = min(batch, default=-1)
        choice = tuple(
            factor if self.axes.is_tensor(axis, tensor) else example
            for axis in range(len(self.axes.sizes))
        )
        table = self.problem.nodes.nodes[node]
        if not can_split(table, choice, self.axes.sizes):
            sizes = []
            for f in sorted({*choice} - {-1}):
                over = [s for s, c in zip(self.axes.sizes, choice, strict=True) if c == f]
                sizes.append(f"{table.factors[f].size} into {math.prod(over)}")
            self._fault(operator, f"its arrays ({table.label}) cannot be split, {', '.join(sizes)}")
            return
        self._decided[node] = choice
        for axis, chosen in enumerate(choice):
            if chosen >= 0 and chosen not in batch:
                self._seeds[axis].add((node, chosen))

    def _allowed(self) -> list[Ints]:
        """For each node, the choice that was decided, or the choices that go on with the splits of
        decided nodes as far as possible.
        """
        kinds = kinds_of(self.problem)
        neighbours = self._neighbours()
        follows = [self._spread(axis, neighbours) for axis in range(len(self.axes.sizes))]
        allowed = []
        for node in self.problem.nodes.nodes:
            if node.index in self._decided:
                allowed.append(np.array([self._decided[node.index]], np.int64))
                continue
            choices = enumerate_choices(node, self.axes.sizes)
            is_state = node.index in kinds.parameters or node.index in kinds.update
            batch = frozenset[int]() if is_state else self.problem.nodes.batch_factors[node.index]
            for axis, name in enumerate(self.axes.names):
                follow = follows[axis].get(node.index, set())
                if name.startswith(MIXED) and not is_state:
                    choices = choices[np.isin(choices[:, axis], [-1, *batch, *follow])]
                else:
                    wanted = np.isin(
                        choices[:, axis], list(batch if name.startswith(DATA) else follow)
                    )
                    choices = choices[wanted if wanted.any() else choices[:, axis] == -1]
            allowed.append(choices)
        return allowed

    def _spread(self, axis: int, neighbours: _Neighbours) -> dict[int, set[int]]:
        """For each undecided node, the factors to which splits by an axis carry over from decided
        nodes.
        """
        reached: dict[int, set[int]] = defaultdict(set)
        pending = sorted(self._seeds[axis])
        while pending:
            node, factor = pending.pop()
            for other, mine, theirs in neighbours.get(node, ()):
                if other in self._decided or mine[factor] < 0 or mine[factor] not in theirs:
                    continue
                same = theirs.index(mine[factor])
                if same not in reached[other]:
                    reached[other].add(same)
                    pending.append((other, same))
        return reached

    def _neighbours(self) -> _Neighbours:
        neighbours: _Neighbours = defaultdict(list)
        for edge in self.problem.nodes.edges:
            neighbours[edge.source].append(
                (edge.target, edge.source_projection, edge.target_projection)
            )
            neighbours[edge.target].append(
                (edge.source, edge.target_projection, edge.source_projection)
            )
        return neighbours

    def _fault(self, operator: int, what: str) -> None:
        self.faults.append(f"operator {operator}, {self.operators.names[operator]}: {what}")


def layers_differ(
    problem: Problem,
    operators: OperatorMap,
    ops: Sequence[int],
    stage: StageConfiguration,
    first: int,
) -> bool:
    """True if layers that would be folded have different degrees or recomputation."""
    seen: dict[int, tuple[object, ...]] = {}
    for op, op_class in zip(problem.graph.ops, problem.nodes.op_class, strict=True):
        k = operators.of_op[ops[op.index]] - first
        if op_class >= 0 and 0 <= k < len(stage.tensor) and operators.computes[ops[op.index]]:
            # Plans state recomputation for products alone.
            again = operators.roles[first + k] in SPLIT_OF and is_repeated(
                operators.roles, stage, first, k
            )
            layout = stage.tensor[k], stage.data[k], stage.algorithm[k], again
            if seen.setdefault(op_class, layout) != layout:
                return True
    return False


def is_repeated(names: Sequence[str], stage: StageConfiguration, first: int, k: int) -> bool:
    """True if the backward pass recomputes a product of a stage: if in the configuration it and the
    next operator are recomputed, and both are in one layer.

    Aceso keeps the result of a layer's last operator. Here the last product of the layer is kept
    instead, or the sum that it is part of, which is as large.

    Aceso's softmax keeps one array in half precision, and can recompute what its dropout makes of
    it. Models of the zoo have no dropout, and their softmax keeps its result in single precision
    beside the same in half. Both are freed if the scores are recomputed, which takes little time,
    so that the configuration needs no more memory than in Aceso.
    """
    if not stage.recompute[k]:
        inside = itertools.takewhile(
            lambda later: names[first + later] in _AFTER_SCORES, range(k + 1, len(stage.recompute))
        )
        return names[first + k] == "enc-attention-score" and any(
            all(stage.recompute[later : later + 2]) and later + 1 < len(stage.recompute)
            for later in inside
        )
    for later in range(k + 1, len(stage.recompute)):
        if names[first + later] in LAYER_STARTS:
            return False
        if not stage.recompute[later]:
            return later > k + 1
        if names[first + later] in SPLIT_OF:
            return True
    return False
