"""The products of a stage: the operator of the chain to which each belongs, and the kinds of its
factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...cost import Problem
from ...graph import Role
from ...sharding import NodeId, Port, Site
from ._image_places import BLOCK_CONVOLUTIONS, CONVOLUTIONS
from ._operator_map import OperatorMap

# Kinds of factors that tensor parallelism splits.
CONTRACTION, FEATURES, HEADS = "contraction", "features", "heads"
SPLIT_OF = {
    "encoder-embedding": (CONTRACTION,),
    "enc-attention-qkv": (FEATURES, CONTRACTION),
    "enc-attention-score": (HEADS,),
    "enc-attention-context": (HEADS,),
    "enc-attention-dense": (CONTRACTION, FEATURES),
    "enc-MLP-GEMM-1": (FEATURES, CONTRACTION),
    "enc-MLP-GEMM-2": (CONTRACTION, FEATURES),
    "gpt-post-process": (FEATURES,),
    "conv1": (FEATURES,),
    **dict.fromkeys(BLOCK_CONVOLUTIONS, (FEATURES, CONTRACTION)),
    "fc": (),
}
"""For each product by role, the kind of factor that tensor parallelism splits under each algorithm;
empty if all ranks of a tensor group do the same work."""

LAYER_STARTS = ("enc-1st-layernorm", "final-layernorm", "block-conv1")
"""Operators before which a run of recomputed operators ends."""
STREAM = (
    "enc-1st-layernorm",
    "enc-post-attention-dropout",
    "enc-2nd-layernorm",
    "enc-post-MLP-dropout",
    "final-layernorm",
)
"""Operators on the residual stream."""
FILL_STREAM = ("encoder-embedding", "enc-attention-dense", "enc-MLP-GEMM-2")
"""Products whose results are added to the residual stream."""
READ_STREAM = ("enc-attention-qkv", "enc-MLP-GEMM-1", "gpt-post-process")
"""Products that read the residual stream."""
IMAGES = (*CONVOLUTIONS, "fc")
"""Products of a chain of convolutions; arrays between them are split only over examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of the forward pass, or several that share a node.

    Attributes:
        node: its node.
        operators: the operators of the chain to which it belongs, one for each copy.
        batch: factors that count examples.
        kinds: kinds of the other factors that tensor parallelism may split, in the order in which
            these are considered.
        result: the port of its result, as the product splits it.
        landed: the port of its result where it is used; None if it is not used.
        sources: for each operand that is an activation, its port as the product splits it, and its
            port where it is made.
    """

    node: NodeId
    operators: tuple[int, ...]
    batch: frozenset[int]
    kinds: dict[int, str]
    result: Port
    landed: Port | None
    sources: tuple[tuple[Port, Port], ...]


def products_of(problem: Problem, operators: OperatorMap, ops: Sequence[int]) -> list[Product]:
    """The products of a stage's forward pass that tensor parallelism splits, in order.

    Args:
        ops: for each operator of the stage, its number in the step.
    """
    members: dict[int, list[int]] = {}
    for op, op_class in zip(problem.graph.ops, problem.nodes.op_class, strict=True):
        if op_class >= 0 and operators.of_op[ops[op.index]] >= 0:
            members.setdefault(op_class, []).append(op.index)
    of_parameters = {i.value for i in problem.graph.inputs if i.role is Role.PARAMETER}
    for op in problem.graph.ops:
        read = [i for i in op.inputs if isinstance(i, int)]
        if read and all(i in of_parameters for i in read):
            of_parameters.update(o for o in op.outputs if o >= 0)
    products = []
    for site in problem.nodes.sites:
        if site.op_class not in members or not site.results or not site.results[0]:
            continue
        result, *landed = site.results[0]
        if result.node < 0 or problem.nodes.nodes[result.node].kind != "product":
            continue
        copies = members[site.op_class]
        operands = problem.graph.ops[copies[0]].inputs
        is_weight = [isinstance(i, int) and i in of_parameters for i in operands]
        product = Product(
            node=result.node,
            operators=tuple(operators.of_op[ops[index]] for index in copies),
            batch=problem.nodes.batch_factors[result.node],
            kinds=_kinds(
                site,
                is_weight,
                problem.nodes.batch_factors[result.node],
                [factor.size for factor in problem.nodes.nodes[result.node].factors],
            ),
            result=result,
            landed=landed[0] if landed and landed[0].node >= 0 else None,
            sources=tuple(
                (port, source)
                for port, source, weight in zip(site.operands, site.sources, is_weight, strict=True)
                if port is not None and source is not None and source.node >= 0 and not weight
            ),
        )
        # The gather of the targets' logits is a product here, but not in Aceso's chain.
        kinds = SPLIT_OF.get(operators.roles[product.operators[0]], ()) or (CONTRACTION,)
        if set(product.kinds.values()) & set(kinds):
            products.append(product)
    return sorted(products, key=lambda product: product.node)


def _kinds(
    site: Site, is_weight: Sequence[bool], batch: frozenset[int], sizes: Sequence[int]
) -> dict[int, str]:
    """Kinds of the factors, other than those of the batch, that tensor parallelism may split.

    Those of size 1 come last. The examples of a micro-batch of one are such a factor: the batch has
    none then, and in a product of two activations it could pass for heads.
    """
    of_result = _factors(site.results[0][0])
    weights, activations = set[int](), list[set[int]]()
    for port, weight in zip(site.operands, is_weight, strict=True):
        if port is not None and weight:
            weights |= _factors(port)
        elif port is not None:
            activations.append(_factors(port))
    kinds = {}
    for f in sorted({*weights, *of_result} - batch, key=lambda f: (sizes[f] == 1, f)):
        read = [f in factors for factors in activations]
        if not weights and all(read):
            kinds[f] = HEADS
        elif f in weights and f not in of_result:
            kinds[f] = CONTRACTION
        elif f in weights and not any(read):
            kinds[f] = FEATURES
    return kinds


def _factors(port: Port) -> set[int]:
    return {f for f, dim in enumerate(port.projection) if dim >= 0}
