"""Conversion of a plan of a GPT, T5 or Wide-ResNet to Aceso's configuration, if its layout can be
written as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core import InputError, listing
from ...cost import PlannedStage, PlannedStep
from ...graph import Phase, Role
from ...plans import StagePlan
from ._configuration import Configuration, StageConfiguration
from ._operator_map import OperatorMap
from ._products import (
    FILL_STREAM,
    IMAGES,
    LAYER_STARTS,
    READ_STREAM,
    SPLIT_OF,
    Product,
    products_of,
)

_ASKED = "this plan cannot be written as a configuration of Aceso's"
_ADVICE = (
    "Plan a pipeline of data and tensor parallelism, for example with --method"
    " megatron:dp2,tp2,pp2, which always can be."
)
_BETWEEN = {
    "enc-attention-softmax": "enc-attention-score",
    "enc-attention-dropout": "enc-attention-score",
}
_BETWEEN |= {"enc-MLP-gelu": "enc-MLP-GEMM-1"}
_IN_LAYERS = ("enc-", "block-")
_READS_BETWEEN = {
    "enc-attention-score": "enc-attention-context",
    "enc-MLP-GEMM-1": "enc-MLP-GEMM-2",
}


def configuration_of(
    step: PlannedStep,
    operators: OperatorMap,
    *,
    family: str,
    model_size: str,
    global_batch: int,
    settings: Mapping[str, Any],
    layers_recompute: bool,
) -> Configuration:
    """The configuration that corresponds to a plan.

    Args:
        operators: the map of the step's operators.
        family, model_size: the configuration's names of them.
        global_batch: samples in a step.
        settings: further keys that Aceso's runtime reads, such as `num_layers`.
        layers_recompute: whether the step itself recomputes its layers.

    Raises:
        InputError: the plan has layouts or a schedule that a configuration cannot express; lists
            all of them.
    """
    plan = step.plan
    faults = list(_schedule_faults(step))
    numbers = (
        [e.ops for e in step.staged.extracts]
        if step.staged
        else [tuple(range(len(step.graph.ops)))]
    )
    stage_of, cuts = _stages(step, operators, numbers)
    faults += cuts
    stages = []
    for k, (stage, planned, ops) in enumerate(zip(step.stages, plan.stages, numbers, strict=True)):
        mine = [o for o, number in enumerate(stage_of) if number == k]
        layout = _StageLayout(
            stage=stage, planned=planned, operators=operators, ops=ops, where=f"stage {k}"
        )
        degrees = [layout.degrees(o) for o in mine]
        faults += [*layout.operator_faults(), *layout.state_faults()]
        each = [layers_recompute and operators.roles[o].startswith(_IN_LAYERS) for o in mine]
        again = [
            planned.recompute == "stage" or a or b
            for a, b in zip(each, layout.recomputed(mine), strict=True)
        ]
        stages.append(
            StageConfiguration(
                num_devices=math.prod(planned.mesh_shape),
                tensor=tuple(d[0] for d in degrees),
                data=tuple(d[1] for d in degrees),
                algorithm=tuple(d[2] for d in degrees),
                recompute=tuple(again),
            )
        )
    if faults:
        raise InputError(listing(_ASKED, faults, _ADVICE))
    return Configuration(
        model_name=family,
        model_size=model_size,
        global_batch=global_batch,
        micro_batch=global_batch // plan.num_micro_batches,
        stages=tuple(stages),
        settings=dict(settings),
    )


def _schedule_faults(step: PlannedStep) -> Iterator[str]:
    plan = step.plan
    if plan.is_pipeline and plan.schedule != "1f1b":
        yield f"its schedule is {plan.schedule}, and Aceso runs 1f1b: plan with --schedule 1f1b"
    if plan.is_pipeline and plan.num_submeshes != len(plan.stages):
        yield (
            f"its {len(plan.stages)} stages share {plan.num_submeshes} groups of devices, and Aceso"
            " gives each its own"
        )
        return
    first = 0
    for k, stage in enumerate(plan.stages):
        if stage.first_device != first:
            yield (
                f"stage {k} begins on device {stage.first_device}, and Aceso puts it behind the"
                f" stages before it, on {first}"
            )
        first = stage.first_device + math.prod(stage.mesh_shape)


def _stages(
    step: PlannedStep, operators: OperatorMap, numbers: Sequence[Sequence[int]]
) -> tuple[list[int], list[str]]:
    """The stage of each operator of the chain, and messages on operators that a cut divides."""
    stages_of: list[set[int]] = [set() for _ in operators.names]
    for k, ops in enumerate(numbers):
        for number in ops:
            if operators.computes[number] and operators.of_op[number] >= 0:
                if step.graph.ops[number].phase is Phase.FORWARD:
                    stages_of[operators.of_op[number]].add(k)
    faults = [
        f"operator {o}, {operators.names[o]}, is cut: it is in stages"
        f" {', '.join(map(str, sorted(stages)))}"
        for o, stages in enumerate(stages_of)
        if len(stages) > 1
    ]
    stage_of: list[int] = []
    # An operator of the chain for which the step computes nothing gets the stage of the one before.
    for stages in stages_of:
        before = stage_of[-1] if stage_of else 0
        stage_of.append(max(before, min(stages, default=before)))
    return stage_of, faults


@dataclass(slots=True, kw_only=True, eq=False)
class _StageLayout:
    """The layout of one stage, read from its choices."""

    stage: PlannedStage
    planned: StagePlan
    operators: OperatorMap
    ops: Sequence[int]
    where: str
    faults: list[tuple[int, str]] = field(default_factory=list)
    products: dict[int, list[Product]] = field(init=False)
    tensor_axes: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.products, self.tensor_axes = {}, set()
        for product in products_of(self.stage.problem, self.operators, self.ops):
            kinds = SPLIT_OF[self.operators.roles[product.operators[0]]]
            choice = self.stage.choices[product.node]
            self.tensor_axes |= {a for a, f in enumerate(choice) if product.kinds.get(f) in kinds}
            for operator in product.operators:
                self.products.setdefault(operator, []).append(product)

    def degrees(self, operator: int) -> tuple[int, int, int]:
        """Tensor degree, data degree and algorithm of an operator of the chain."""
        if operator in self.products:
            degrees = {self._of_product(operator, product) for product in self.products[operator]}
            if len(degrees) > 1 and operator not in {o for o, _ in self.faults}:
                shown = " and ".join(f"tp{t} dp{d} algorithm {a}" for t, d, a in sorted(degrees))
                self._fault(operator, f"its products are split in different ways: {shown}")
            return min(degrees)
        return self._of_group(operator)

    def recomputed(self, mine: Sequence[int]) -> list[bool]:
        """Whether each operator of the stage is recomputed: each product that the plan recomputes,
        and the operators after it up to the next product of its layer, which is included.

        Aceso frees the activations of an operator only if it and the next one are recomputed.
        """
        marked = [False] * len(mine)
        for k, operator in enumerate(mine):
            products = self.products.get(operator, ())
            if not products or not self.stage.repeat.issuperset(
                product.node for product in products
            ):
                continue
            marked[k] = True
            for later in range(k + 1, len(mine)):
                if self.operators.roles[mine[later]] in LAYER_STARTS:
                    break
                marked[later] = True
                if mine[later] in self.products:
                    break
        return marked

    def operator_faults(self) -> Iterator[str]:
        """Messages on splits of operators that a configuration cannot express; equal ones of
        several layers share one line.
        """
        by_kind: dict[tuple[str, str], dict[int, None]] = {}
        for operator, what in self.faults:
            by_kind.setdefault((self.operators.names[operator], what), {})[operator] = None
        for (name, what), numbers in by_kind.items():
            yield f"{self.where}, {name} (operators {', '.join(map(str, numbers))}): {what}"

    def state_faults(self) -> Iterator[str]:
        """Messages on splits of parameters and optimizer state other than by tensor parallelism."""
        split: dict[tuple[str, str], int] = {}
        problem = self.stage.problem
        for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True):
            if item.role not in (Role.PARAMETER, Role.OPTIMIZER_STATE) or port.node < 0:
                continue
            for a, factor in enumerate(self.stage.choices[port.node]):
                if factor >= 0 and port.projection[factor] >= 0 and a not in self.tensor_axes:
                    what = (
                        "parameters are"
                        if item.role is Role.PARAMETER
                        else "the state of the optimizer is"
                    )
                    split[what, self.planned.axis_names[a]] = (
                        split.get((what, self.planned.axis_names[a]), 0) + 1
                    )
        for (what, axis), count in split.items():
            yield (
                f"{self.where}: {what} split over axis {axis!r} ({count} arrays), as by ZeRO or"
                " FSDP, and Aceso keeps the state whole on all data ranks"
            )

    def _of_product(self, operator: int, product: Product) -> tuple[int, int, int]:
        """Degrees and algorithm of an operator, from the split of one of its products."""
        kinds = SPLIT_OF[self.operators.roles[operator]]
        tensor = data = 1
        split: set[str] = set()
        for a, factor in enumerate(self.stage.choices[product.node]):
            size, axis = self.planned.mesh_shape[a], self.planned.axis_names[a]
            kind = product.kinds.get(factor, "")
            if factor in product.batch:
                data *= size
            elif kind in kinds:
                tensor *= size
                split.add(kind)
            elif factor < 0 and not kinds:
                tensor *= size
            elif factor < 0 and size > 1:
                self._fault(operator, f"all {size} devices along axis {axis!r} do the same work")
            elif size > 1:
                label = self.stage.problem.nodes.nodes[product.node].factors[factor].label
                self._fault(
                    operator,
                    f"axis {axis!r} splits dim {label}, neither examples nor what tensor degrees"
                    " split",
                )
        if len(split) > 1:
            self._fault(
                operator,
                f"it is split by {' and '.join(sorted(split))} at once, and Aceso's by one of them",
            )
        return tensor, data, min((kinds.index(kind) for kind in split), default=0)

    def _of_group(self, operator: int) -> tuple[int, int, int]:
        """Degrees and algorithm of an operator between products, from the split of its arrays."""
        devices = math.prod(self.planned.mesh_shape)
        name = self.operators.roles[operator]
        node = self._node(operator)
        if node is None:
            data = math.prod(
                self.planned.mesh_shape[self.planned.axis_names.index(a)]
                for a in self.planned.data_axes
            )
            return devices // data, data, 0
        batch, data = self.stage.problem.nodes.batch_factors[node], 1
        for a, factor in enumerate(self.stage.choices[node]):
            size, axis = self.planned.mesh_shape[a], self.planned.axis_names[a]
            if factor in batch:
                data *= size
            elif size > 1 and (factor >= 0) != (name in _BETWEEN):
                how = (
                    "also splits something else than examples" if factor >= 0 else "splits nothing"
                )
                self._fault(operator, f"axis {axis!r} {how} of its arrays")
        return devices // data, data, 0

    def _node(self, operator: int) -> int | None:
        """The node of the arrays that an operator between products works on; None if the stage has
        no product that makes or reads them.
        """
        name = self.operators.roles[operator]
        if not {*IMAGES}.isdisjoint(self.operators.roles):
            return self._node_of_images(operator)
        filled: tuple[str, ...] = FILL_STREAM
        read: tuple[str, ...] = READ_STREAM
        if name in _BETWEEN:
            filled, read = (_BETWEEN[name],), (_READS_BETWEEN[_BETWEEN[name]],)
        # The split of an array is decided at the product that makes or reads it.
        nearest = sorted(self.products, key=lambda o: abs(o - operator))
        for other in nearest:
            for product in self.products[other]:
                if self.operators.roles[other] in filled and product.landed is not None:
                    return product.landed.node
                if self.operators.roles[other] in read and product.sources:
                    return product.sources[-1][1].node
        return None

    def _node_of_images(self, operator: int) -> int | None:
        """The node of the arrays between two convolutions that an operator works on."""
        before = [o for o in self.products if o < operator]
        for product in self.products[max(before)] if before else ():
            if product.landed is not None:
                return product.landed.node
        behind = [o for o in self.products if o > operator]
        for product in self.products[min(behind)] if behind else ():
            if product.sources:
                return product.sources[-1][1].node
        return None

    def _fault(self, operator: int, what: str) -> None:
        self.faults.append((operator, what))
