"""The operator of Aceso's chain to which each operator of a captured GPT, T5 or Wide-ResNet
belongs.

The forward pass is followed in program order. Operators that read a parameter (products, norms,
biases) belong to the chain's operator with that parameter. An operator that reads none belongs to
the chain's operator whose result it reads, or to the one after that, as `_STEPS` says: after
attention scores to the softmax, for example. See `_image_places.py` for convolutions.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...graph import Graph, Phase, Role, traits_of
from ._chain import first_match
from ._image_places import place_of_image_operator

# For chain operators by role: how many places further along the chain those operators of the step
# belong that read only its result.
_STEPS = {
    "encoder-embedding": 1,
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
    """The map from the operators of a captured step to those of a chain.

    Attributes:
        names: names of the chain's operators.
        roles: for each operator of the chain, the operator of a GPT, or of a chain of convolutions,
            that has the same function.
        of_op: for each operator of the step, the position of the chain's operator to which it
            belongs; -1 for constants, and outside of the forward pass.
        computes: for each operator of the step, whether it computes on activations: casts and
            transposes do not, nor do operators on parameters alone.
    """

    names: tuple[str, ...]
    roles: tuple[str, ...]
    of_op: tuple[int, ...]
    computes: tuple[bool, ...]


def map_operators(
    graph: Graph, names: Sequence[str], description: Mapping[str, Any]
) -> OperatorMap:
    """Map the operators of a model of the zoo to those of Aceso's chain.

    Args:
        graph: the step, with unrolled layers.
        names: names of the chain's operators, in order.
        description: description of the chain, as in `chains.toml`.
    """
    roles = [first_match(name, description.get("roles", {}), name) for name in names]
    patterns = []
    for path, named in description["parameters"].items():
        places = []
        for name, (place, other) in itertools.product(named, enumerate(names)):
            if fnmatch.fnmatchcase(other, name):
                places.append(place)
        patterns.append((re.compile(path), places))
    begins = description.get("inputs", {})
    at: dict[int, int] = {}
    of_parameters: set[int] = set()
    tokens: set[int] = set()
    for item in graph.inputs:
        if item.role is Role.PARAMETER:
            at[item.value] = _place_of_parameter(item.path, patterns)
            of_parameters.add(item.value)
        elif item.role is Role.BATCH:
            begun = begins.get(item.path.rpartition(".")[2])
            at[item.value] = _TOKENS if begun is None else names.index(begun)
            tokens.add(item.value)
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
        elif parameters is None and tokens.issuperset(read):
            # Operators that prepare tokens have the place of the tokens.
            place = activations
            tokens.update(results)
        else:
            made_before = [at[i] for i in read if i not in of_parameters and i not in tokens]
            if description.get("convolutions"):
                rank = max((len(graph.values[o].shape) for o in results), default=0)
                place = place_of_image_operator(op.name, rank, made_before, parameters, roles)
            else:
                place = _place(op.name, max(made_before, default=activations), parameters, roles)
            computes[op.index] = place != _TOKENS and traits_of(op.name).moves is None
        of_op[op.index] = place
        at.update(dict.fromkeys(results, place))
    return OperatorMap(
        names=tuple(names), roles=tuple(roles), of_op=tuple(of_op), computes=tuple(computes)
    )


def _place_of_parameter(
    path: str, patterns: Sequence[tuple[re.Pattern[str], Sequence[int]]]
) -> int:
    for pattern, copies in patterns:
        if match := pattern.search(path):
            number = int(match[1]) if match.groups() else 0
            return copies[number] if number < len(copies) else -1
    return -1


def _place(name: str, activations: int, parameters: int | None, roles: Sequence[str]) -> int:
    """The place in the chain of an operator that reads activations."""
    if name == "dot_general":
        if parameters is not None:
            # A tied embedding is read again at the end, by the output head.
            return parameters if parameters > activations else len(roles) - 1
        is_score = roles[activations] == "enc-attention-qkv"
        return activations + (1 if is_score else roles[activations:].index("enc-attention-context"))
    if parameters is not None:
        return max(parameters, activations)
    if activations == _TOKENS or traits_of(name).moves is not None:
        return activations
    return activations + _STEPS.get(roles[activations], 0)
