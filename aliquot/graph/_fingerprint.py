"""Fingerprints of the step that a plan was made for: of its interface, which must match, and of its
graph, which may change with a library's release.

Both are the same in every process: nothing in them depends on addresses, hashing order or the text
of name stacks.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import _jax_compat as compat
from ._types import Block, Graph, Literal, Memory, Operand, Value

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SET = re.compile(r"(?<=set\(\{)[^{}]*(?=\}\))")


def interface_fingerprint(graph: Graph) -> str:
    """SHA-256, in hexadecimal, of path, shape, dtype and role of every input and path, shape and
    dtype of every output, and of which of them lie in host memory.

    A plan names its shardings by path; it fits every step with the same interface.
    """
    lines = []
    for item in graph.inputs:
        value = graph.values[item.value]
        lines.append(f"in {item.path!r} {value.shape} {value.dtype} {item.role}{_place(value)}")
    for output in graph.outputs:
        array = graph.values[output.value] if isinstance(output.value, int) else output.value
        lines.append(f"out {output.path!r} {array.shape} {array.dtype}{_place(array)}")
    return _digest(lines)


def graph_fingerprint(graph: Graph) -> str:
    """SHA-256, in hexadecimal, of all operators with their parameters, wiring, shapes and nesting.

    Constants count by shape and dtype, not by their contents. Another release of JAX, Flax or Optax
    may change it for the same step.
    """
    texts = _Texts()
    lines = [f"{value.shape} {value.dtype}{_place(value)}" for value in graph.values]
    lines += _op_lines(graph, texts)
    lines.append(f"constants {sorted(graph.constants)}")
    _nest(graph.body, texts, lines)
    return _digest(lines)


def _place(array: Value | Literal) -> str:
    """The memory of an array; nothing for device memory, in which most arrays lie."""
    return "" if array.memory is Memory.DEVICE else f" {array.memory}"


def operator_lines(graph: Graph) -> list[str]:
    """One line for each operator with its parameters and wiring, by which two traces can be
    compared.
    """
    return _op_lines(graph, _Texts())


def _op_lines(graph: Graph, texts: _Texts) -> list[str]:
    found = []
    for op in graph.ops:
        found.append(
            f"{op.name} {_wires(op.inputs)} {op.outputs} {texts.params(op.params)} {op.trips}"
            f" {op.region}"
        )
    return found


def traced_lines(closed: Any) -> tuple[list[tuple[str, Any]], list[Any]]:
    """The lines of a traced function (a closed jaxpr) by which two traces can be compared, each
    with its equation or None, and all constants. Bodies follow the equations that hold them.
    """
    texts = _Texts()
    numbers: dict[Any, int] = {}
    lines: list[tuple[str, Any]] = []
    constants: list[Any] = []

    def name(atom: Any) -> str:
        if compat.is_literal(atom):
            return f"{atom.val!s}:{atom.aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"

    def add(body: Any) -> None:
        jaxpr, consts = compat.open_body(body)
        constants.extend(consts)
        lines.append((f"takes {', '.join(map(name, [*jaxpr.constvars, *jaxpr.invars]))}", None))
        for eqn in jaxpr.eqns:
            bodies = list(filter(compat.holds_jaxpr, eqn.params.values()))
            rest = {k: v for k, v in eqn.params.items() if not compat.holds_jaxpr(v)}
            wires = f"{', '.join(map(name, eqn.invars))} -> {', '.join(map(name, eqn.outvars))}"
            line = f"{eqn.primitive.name} {wires} {texts.params(rest)}"
            lines.append((line, eqn))
            for value in bodies:
                for inner in value if isinstance(value, tuple | list) else (value,):
                    add(inner)
        lines.append((f"returns {', '.join(map(name, jaxpr.outvars))}", None))

    add(closed)
    return lines, constants


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _wires(operands: Sequence[Operand]) -> str:
    texts = []
    for i in operands:
        texts.append(str(i) if type(i) is not Literal else f"{i.value!s}:{i.dtype}{i.shape}")
    return ",".join(texts)


def _nest(block: Block, texts: _Texts, lines: list[str]) -> None:
    """Add the nested view to `lines`: which operators stand in which body of which call."""
    lines.append(f"block {_wires(block.inputs)} -> {_wires(block.outputs)}")
    for item in block.items:
        if isinstance(item, int):
            lines.append(str(item))
            continue
        # Bodies follow as blocks; the text of their jaxprs would repeat them.
        settings = {}
        for key, value in item.eqn.params.items():
            if not compat.holds_jaxpr(value):
                settings[key] = value
        lines.append(f"{item.kind} {_wires(item.inputs)} {item.outputs} {texts.params(settings)}")
        for inner in item.blocks:
            _nest(inner, texts, lines)
    lines.append("end")


class _Texts:
    """Stable text of parameters. Text that is slow to format is cached by the identity of the
    value, which the graph keeps alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def params(self, params: Mapping[str, Any]) -> str:
        return (
            ";".join([f"{key}={self.of(params[key])}" for key in sorted(params)]) if params else ""
        )

    def of(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        if type(value) is tuple:
            return f"({','.join(map(self.of, value))})"
        known = self._known.get(id(value))
        if known is None or known[0] is not value:
            known = (value, self._format(value))
            self._known[id(value)] = known
        return known[1]

    def _format(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, Mapping):
            return (
                "{" + ",".join(sorted(f"{self.of(k)}:{self.of(v)}" for k, v in value.items())) + "}"
            )
        if isinstance(value, set | frozenset):
            # The order of a set of strings differs between processes.
            return "{" + ",".join(sorted(map(self.of, value))) + "}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__}({','.join(map(self.of, value))})"
        if compat.holds_jaxpr(value):
            return self._jaxpr(value)
        if isinstance(value, functools.partial):
            return f"partial({self.of(value.func)},{self.of(value.args)},{self.of(value.keywords)})"
        if isinstance(value, type) or hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        # Objects without their own `repr` show their address, which differs between processes, as
        # does the order of a set that they hold, such as the names of a remat policy.
        text = _ADDRESS.sub("", repr(value))
        return _SET.sub(lambda found: ", ".join(sorted(found[0].split(", "))), text)

    def _jaxpr(self, value: Any) -> str:
        """Digest of a jaxpr that an operator holds, such as the sum inside a scatter."""
        jaxpr, _ = compat.open_body(value)
        numbers: dict[Any, int] = {}

        def name(atom: Any) -> str:
            if compat.is_literal(atom):
                return f"{atom.val!s}:{atom.aval}"
            return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"

        lines = [",".join(map(name, [*jaxpr.constvars, *jaxpr.invars]))]
        for eqn in jaxpr.eqns:
            wires = f"{','.join(map(name, eqn.invars))} -> {','.join(map(name, eqn.outvars))}"
            lines.append(f"{eqn.primitive.name} {wires} {self.params(eqn.params)}")
        lines.append(",".join(map(name, jaxpr.outvars)))
        return _digest(lines)
