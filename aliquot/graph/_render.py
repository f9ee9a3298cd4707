"""Graphs as text, with one line for each operator, or as drawings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ._types import Block, Graph, Operand, Phase

_COLOURS = {
    Phase.PROLOGUE: "gray85",
    Phase.FORWARD: "lightblue",
    Phase.BACKWARD: "lightsalmon",
    Phase.UPDATE: "palegreen",
}


def to_text(graph: Graph, *, max_ops: int | None = None) -> str:
    """A listing: inputs with their roles, then operators as they nest, each with phase, shapes and
    scope.

    Args:
        graph: a captured step.
        max_ops: stop after so many lines of operators, saying how many are left; all by default.
    """
    lines = [
        f"{graph.name}: {len(graph.inputs)} inputs, {len(graph.ops)} operators,"
        f" {len(graph.outputs)} outputs"
    ]
    for item in graph.inputs:
        successor = f" -> output {item.output}" if item.output is not None else ""
        lines.append(f"  {_value(graph, item.value)}  {item.role}  {item.path}{successor}")
    listed = list(_block(graph, graph.body, 1))
    lines += listed if max_ops is None else listed[:max_ops]
    if max_ops is not None and len(listed) > max_ops:
        lines.append(f"  ... {len(listed) - max_ops} more lines")
    lines += [
        f"  return {_operand(graph, output.value)}  {output.path}" for output in graph.outputs
    ]
    return "\n".join(lines)


def to_dot(graph: Graph) -> str:
    """The graph in Graphviz's language, operators coloured by phase and inputs drawn as boxes with
    their paths.
    """
    lines = ["digraph {", "  node [style=filled];"]
    source: dict[int, str] = {}
    for item in graph.inputs:
        source[item.value] = f"v{item.value}"
        label = _quoted(f"{item.path}\n{item.role}")
        lines.append(f"  v{item.value} [shape=box, fillcolor=white, label={label}];")
    for index in graph.constants:
        source[index] = f"v{index}"
        lines.append(
            f"  v{index} [shape=box, fillcolor=white, label={_quoted(_value(graph, index))}];"
        )
    for op in graph.ops:
        label = _quoted(
            "\n".join([op.name, *(_value(graph, out) for out in op.outputs if out >= 0)])
        )
        lines.append(f"  o{op.index} [fillcolor={_COLOURS[op.phase]}, label={label}];")
        source.update({out: f"o{op.index}" for out in op.outputs if out >= 0})
    for op in graph.ops:
        reads = {source[i] for i in op.inputs if isinstance(i, int) and i in source}
        lines += [f"  {name} -> o{op.index};" for name in sorted(reads)]
    return "\n".join([*lines, "}"])


def _block(graph: Graph, block: Block, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for item in block.items:
        if isinstance(item, int):
            op = graph.ops[item]
            results = _operands(graph, op.outputs)
            trips = f" x{op.trips}" if op.trips > 1 else ""
            scope = f"  [{op.scope}]" if op.scope else ""
            yield indent + (
                f"{op.phase.name.lower()}{trips}  {results} ="
                f" {op.name}({_operands(graph, op.inputs)}){scope}"
            )
        else:
            results, operands = _operands(graph, item.outputs), _operands(graph, item.inputs)
            yield indent + f"{results} = {item.kind}({operands}):"
            for inner in item.blocks:
                yield from _block(graph, inner, depth + 1)


def _operands(graph: Graph, operands: Iterable[Operand]) -> str:
    return ", ".join(_operand(graph, operand) for operand in operands)


def _operand(graph: Graph, operand: Operand) -> str:
    if not isinstance(operand, int):
        return f"{operand.value}"
    return _value(graph, operand) if operand >= 0 else "_"


def _value(graph: Graph, index: int) -> str:
    value = graph.values[index]
    return f"%{index}:{value.dtype}[{','.join(map(str, value.shape))}]"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
