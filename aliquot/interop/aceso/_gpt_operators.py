"""The operator of Aceso's chain that each operator of a captured GPT belongs to.

The forward pass is followed in program order: parameters say where products, norms and biases belong; of the others,
what is computed of an operator's result without a parameter belongs to the next one that has none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...graph import Graph, Phase, Role, traits_of

_EMBEDDING = "encoder-embedding"
_FINAL_NORM = "final-layernorm"
_HEAD = "gpt-post-process"
_OF_PARAMETER = (
    (re.compile(r"\.layers\[(\d+)\]\.norm1\."), "enc-1st-layernorm"),
    (re.compile(r"\.layers\[(\d+)\]\.attn\.[qkv]\."), "enc-attention-qkv"),
    (re.compile(r"\.layers\[(\d+)\]\.attn\.out\."), "enc-attention-dense"),
    (re.compile(r"\.layers\[(\d+)\]\.norm2\."), "enc-2nd-layernorm"),
    (re.compile(r"\.layers\[(\d+)\]\.mlp\.up\."), "enc-MLP-GEMM-1"),
    (re.compile(r"\.layers\[(\d+)\]\.mlp\.down\."), "enc-MLP-GEMM-2"),
    (re.compile(r"\.norm\."), _FINAL_NORM),
    (re.compile(r"\.head\."), _HEAD),
    (re.compile(r"\.embed\.|\.position$"), _EMBEDDING),
)
# How far behind an operator stands what is computed of its result alone.
_STEPS = {
    _EMBEDDING: 1,
    "enc-attention-score": 1,
    "enc-attention-dense": 1,
    "enc-post-attention-dropout": 1,
    "enc-MLP-GEMM-1": 1,
    "enc-MLP-GEMM-2": 1,
    "enc-post-MLP-dropout": 1,
}
_TOKENS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMap:
    """A captured step and a chain.

    Attributes:
        names: of the chain's operators.
        of_op: for each operator of the step the chain's operator that it belongs to; -1 for constants, and outside of the
            forward pass.
        computes: for each whether it computes on activations: it is no cast, no transpose, and nothing of parameters alone.
    """

    names: tuple[str, ...]
    of_op: tuple[int, ...]
    computes: tuple[bool, ...]


def map_gpt(graph: Graph, names: Sequence[str]) -> OperatorMap:
    """The operators of a GPT of the zoo, by those of Aceso's chain.

    Args:
        graph: the step, its layers written out.
        names: of the chain's operators, in order.
    """
    places = _places(names)
    at: dict[int, int] = {}
    of_parameters: set[int] = set()
    for item in graph.inputs:
        if item.role is Role.PARAMETER:
            at[item.value] = _place_of_parameter(item.path, places)
            of_parameters.add(item.value)
        elif item.role is Role.BATCH:
            at[item.value] = _TOKENS
    of_op, computes = [-1] * len(graph.ops), [False] * len(graph.ops)
    for op in graph.ops:
        if op.phase not in (Phase.PROLOGUE, Phase.FORWARD):
            continue
        read = [i for i in op.inputs if isinstance(i, int) and i in at]
        if not read:
            continue
        parameters = max((at[i] for i in read if i in of_parameters), default=None)
        activations = max((at[i] for i in read if i not in of_parameters), default=None)
        results = [o for o in op.outputs if o >= 0]
        if activations is None:
            assert parameters is not None
            place = parameters
            of_parameters.update(results)
        else:
            place = _place(op.name, activations, parameters, names)
            computes[op.index] = place != _TOKENS and traits_of(op.name).moves is None
        of_op[op.index] = place
        at.update(dict.fromkeys(results, place))
    return OperatorMap(names=tuple(names), of_op=tuple(of_op), computes=tuple(computes))


def _places(names: Sequence[str]) -> dict[tuple[str, int], int]:
    """Where the operators of each layer stand."""
    seen: dict[str, int] = {}
    places = {}
    for place, name in enumerate(names):
        places[name, seen.get(name, 0)] = place
        seen[name] = seen.get(name, 0) + 1
    return places


def _place_of_parameter(path: str, places: dict[tuple[str, int], int]) -> int:
    for pattern, name in _OF_PARAMETER:
        if match := pattern.search(path):
            return places.get((name, int(match[1]) if match.groups() else 0), -1)
    return -1


def _place(name: str, activations: int, parameters: int | None, names: Sequence[str]) -> int:
    """Where an operator on activations stands."""
    if name == "dot_general":
        if parameters is not None:
            # A tied embedding is read once more at the end.
            return parameters if parameters > activations else len(names) - 1
        is_score = names[activations] == "enc-attention-qkv"
        return activations + (1 if is_score else names[activations:].index("enc-attention-context"))
    if parameters is not None:
        return max(parameters, activations)
    if activations == _TOKENS or traits_of(name).moves is not None:
        return activations
    return activations + _STEPS.get(names[activations], 0)
