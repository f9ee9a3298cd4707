"""Which operators are forward, backward, update or prologue, and what each input is to training.

Dataflow decides; the text of the name stack (`jvp(` in the forward, `transpose(` in the backward pass) only tells where
differentiation began. The text is no API of JAX: a test pins it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ._types import Input, Op, Operand, Output, Phase, Role, Value


def label(scope: str) -> Phase | None:
    """The phase that a name stack tells by itself, or None."""
    if "transpose(" in scope:
        return Phase.BACKWARD
    return Phase.FORWARD if "jvp(" in scope else None


def assign_phases(ops: Sequence[Op], num_values: int) -> tuple[Op, ...]:
    """Operators with their phases.

    An operator without a label that depends on the backward pass is update; one that depends on the forward pass only is
    forward (metrics, running statistics); one that depends on neither is prologue if it feeds either, else update. A step
    without any label is forward only.
    """
    labels = [label(op.scope) if not op.is_link else None for op in ops]
    if all(known is None for known in labels):
        return tuple(replace(op, phase=Phase.FORWARD) for op in ops)
    after_forward = bytearray(num_values)
    after_backward = bytearray(num_values)
    phases: list[Phase | None] = []
    for op, known in zip(ops, labels, strict=True):
        inputs = [i for i in op.inputs if isinstance(i, int)]
        backward = known is Phase.BACKWARD or any(after_backward[i] for i in inputs)
        forward = known is Phase.FORWARD or any(after_forward[i] for i in inputs)
        if known is None and backward:
            known = Phase.UPDATE
        elif known is None and forward:
            known = Phase.FORWARD
        phases.append(known)
        for out in op.outputs:
            if out >= 0:
                after_backward[out], after_forward[out] = backward, forward
    feeds = bytearray(num_values)
    result: list[Op] = []
    for op, phase in zip(reversed(ops), reversed(phases), strict=True):
        wanted = phase in (Phase.FORWARD, Phase.BACKWARD) or any(o >= 0 and feeds[o] for o in op.outputs)
        if phase is None:
            phase = Phase.PROLOGUE if wanted else Phase.UPDATE
        if wanted and phase is not Phase.UPDATE:
            for i in op.inputs:
                if isinstance(i, int):
                    feeds[i] = 1
        result.append(replace(op, phase=phase))
    return tuple(reversed(result))


def assign_roles(
    ops: Sequence[Op], values: Sequence[Value], inputs: Sequence[Input], outputs: Sequence[Output], batch: set[str]
) -> tuple[Input, ...]:
    """Inputs with their roles; `batch` holds the paths of what each step gets anew.

    A parameter is a floating-point input that the forward pass reads and whose successor depends on the backward pass (or
    is itself: a frozen parameter). State that the forward pass never reads is optimizer state; other state is running
    statistics, random keys and the like.
    """
    read = _reaching_forward(ops, len(values))
    learned = _after_backward(ops, len(values))
    trains = any(op.phase is Phase.BACKWARD for op in ops)

    def role(item: Input) -> Role:
        if item.path in batch:
            return Role.BATCH
        floating = "float" in values[item.value].dtype
        if item.output is None:
            return Role.PARAMETER if floating and not trains and read[item.value] else Role.OTHER
        successor: Operand = outputs[item.output].value
        if not read[item.value]:
            return Role.OPTIMIZER_STATE
        changed = isinstance(successor, int) and bool(learned[successor])
        return Role.PARAMETER if floating and (changed or successor == item.value) else Role.STATE

    return tuple(replace(i, role=role(i)) for i in inputs)


def _reaching_forward(ops: Sequence[Op], num_values: int) -> bytearray:
    """Which values forward or backward operators read, directly or through prologue operators."""
    reaching = bytearray(num_values)
    for op in reversed(ops):
        inner = op.phase in (Phase.FORWARD, Phase.BACKWARD)
        if inner or (op.phase is Phase.PROLOGUE and any(o >= 0 and reaching[o] for o in op.outputs)):
            for i in op.inputs:
                if isinstance(i, int):
                    reaching[i] = 1
    return reaching


def _after_backward(ops: Sequence[Op], num_values: int) -> bytearray:
    """Which values depend on the backward pass."""
    after = bytearray(num_values)
    for op in ops:
        if op.phase is Phase.BACKWARD or any(isinstance(i, int) and after[i] for i in op.inputs):
            for out in op.outputs:
                if out >= 0:
                    after[out] = 1
    return after
