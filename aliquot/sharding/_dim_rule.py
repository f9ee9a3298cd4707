"""The rule of an operator: declared for its primitive, or inferred."""

from __future__ import annotations

import msgspec

from ..core import InputError, MissingRuleError
from ..graph import (
    DimRule,
    Graph,
    HasShape,
    Literal,
    Op,
    Value,
    declared_rule,
    result_shapes,
    whole,
)
from ._infer import infer_rule

_WITHOUT_RULE = ("infer", "error", "replicate")


def dim_rule(op: Op, graph: Graph, *, on_missing_rule: str = "infer") -> DimRule:
    """The rule of one operator.

    Args:
        on_missing_rule: what to do for a primitive without a rule. "infer": find out by evaluating
            the operator alone on small random operands, on the host; an operator that cannot be
            evaluated, or not be split, runs whole. "replicate": let it run whole. "error": raise.

    Raises:
        InputError: `on_missing_rule` is none of these.
        MissingRuleError: no rule is registered for the primitive, and "error" is asked for.
    """
    if on_missing_rule not in _WITHOUT_RULE:
        words = ", ".join(f'"{word}"' for word in _WITHOUT_RULE)
        raise InputError(f"on_missing_rule is {on_missing_rule!r}, and can be {words}.")
    operands: list[Literal | Value] = []
    # As rules see them: constants of the step have their values.
    given: list[HasShape] = []
    for o in op.inputs:
        value = o if isinstance(o, Literal) else graph.values[o]
        operands.append(value)
        if not isinstance(o, Literal) and o in graph.constants:
            known = graph.constants[o]
            value = Literal(value=known, shape=value.shape, dtype=value.dtype)
        given.append(value)
    results = result_shapes(op, graph.values)
    fn = declared_rule(op.name)
    if fn is not None:
        return fn(given, results, op.params)
    if on_missing_rule == "infer" and op.eqn is not None:
        return infer_rule(op.eqn, operands, results) or whole(operands, results)
    if on_missing_rule == "replicate":
        return whole(operands, results)
    shapes = ", ".join(str(o.shape) for o in operands)
    raise MissingRuleError(
        f"No dimension rule for primitive `{op.name}` (operand shapes {shapes}; in"
        f" {op.scope or graph.name}). Without one the "
        "planner cannot tell which dimensions may be split. Register one with"
        " `@aliquot.register_dim_rule"
        f'("{op.name}")`, or pass on_missing_rule="infer" to have one found out by evaluating it on'
        " small arrays, or "
        'on_missing_rule="replicate" to run it whole on every device.'
    )


def is_declared(op: Op) -> bool:
    """True if the rule of an operator is declared for its primitive. The links of loops have
    one.
    """
    return declared_rule(op.name) is not None


class Inferred(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that was inferred, in its short form, and for how many operators of a step."""

    primitive: str
    text: str
    splits: bool
    count: int


def inferred_rules(graph: Graph) -> tuple[Inferred, ...]:
    """Inferred rules of a step's operators whose primitives have none declared, in order of first
    use.
    """
    counts: dict[tuple[str, str], tuple[bool, int]] = {}
    for op in graph.ops:
        if not is_declared(op):
            rule = dim_rule(op, graph)
            key = op.name, rule.text
            counts[key] = bool(rule.factors), counts.get(key, (False, 0))[1] + 1
    found = []
    for (name, text), (splits, count) in counts.items():
        found.append(Inferred(primitive=name, text=text, splits=splits, count=count))
    return tuple(found)
