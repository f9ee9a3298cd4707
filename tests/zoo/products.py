"""Floating-point operations of the products in a traced function."""

import math

import jax


def forward_flops(jaxpr):
    """Two for each point of a result and each number that is summed into it."""
    flops = 0
    for eqn in jaxpr.eqns:
        inner = [
            getattr(value, "jaxpr", value)
            for value in eqn.params.values()
            if isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)
        ]
        flops += sum(map(forward_flops, inner))
        points = math.prod(eqn.outvars[0].aval.shape)
        if eqn.primitive.name == "conv_general_dilated":
            out = eqn.params["dimension_numbers"].rhs_spec[0]
            kernel = eqn.invars[1].aval.shape
            flops += 2 * points * math.prod(kernel) // kernel[out]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            flops += 2 * points * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    return flops
