"""Rules of operators that work element by element, with and without broadcasting."""

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax import lax
from sharding.rule_case import B, C, Case, M, N, X, Y, adder, floats, ints

ELEMENTWISE = {
    name: (getattr(lax, name), (X,))
    for name in (
        "abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf"
        " erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt"
        " sign sin sinh sqrt square tan tanh"
    ).split()
} | {
    name: (getattr(lax, name), (X, Y))
    for name in (
        "add atan2 complex div eq ge gt le lt max min mul ne nextafter pow rem sub"
    ).split()
}
for name in ("igamma", "igamma_grad_a", "igammac"):
    ELEMENTWISE[name] = (getattr(lax, name), (X[:4], Y[:4]))
ELEMENTWISE |= {
    "acosh": (lambda x: lax.acosh(x + 1.0), (X,)),
    "add_any": (jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x))), (X,)),
    "and": (lax.bitwise_and, (B, C)),
    "clamp": (lambda x, lo, hi: lax.clamp(lo, x, hi), (X, X - 0.1, X + 0.1)),
    "clz": (lax.clz, (N,)),
    "conj": (lambda x, y: lax.conj(lax.complex(x, y)), (X, Y)),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), (X,)),
    "copy": (jnp.copy, (X,)),
    "imag": (lambda x, y: lax.imag(lax.complex(x, y)), (X, Y)),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), (X,)),
    "not": (lax.bitwise_not, (B,)),
    "or": (lax.bitwise_or, (B, C)),
    "polygamma": (lambda x, y: lax.polygamma(jnp.round(x) + 1, y), (X, Y)),
    "population_count": (lax.population_count, (N,)),
    "real": (lambda x, y: lax.real(lax.complex(x, y)), (X, Y)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    "regularized_incomplete_beta": (
        lambda a, b, x: lax.betainc(a, b, x),
        (X[:4], Y[:4], floats(4, low=0.3)),
    ),
    "select_n": (lax.select_n, (B, X, Y)),
    "shift_left": (lax.shift_left, (N, M)),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, (N, M)),
    "shift_right_logical": (lax.shift_right_logical, (N, M)),
    "stop_gradient": (lax.stop_gradient, (X,)),
    "xor": (lax.bitwise_xor, (B, C)),
    "zeta": (lambda x, y: lax.zeta(x + 1.5, y), (X, Y)),
}
# Primitives of releases after the oldest supported one.
RECENT = {
    "log2": (lambda x: lax.log2(x), (X,)),
    "one_minus_square": (lambda x: lax.one_minus_square(x), (X,)),
    "polynomial": (lambda x, y: lax.polynomial(x, [y, x, y]), (X, Y)),
}
ABSENT = {name for name in RECENT if not hasattr(jax.extend.core.primitives, f"{name}_p")}
ELEMENTWISE |= {name: case for name, case in RECENT.items() if name not in ABSENT}
for name in ("eq_to", "le_to", "lt_to"):
    ELEMENTWISE[name] = (getattr(jax.extend.core.primitives, f"{name}_p").bind, (X, Y))

STOPS_TOGETHER = (
    "a loop runs until all elements have converged, and so agrees on one truth value per round"
)
LOOPS = dict.fromkeys(
    ("igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta"), STOPS_TOGETHER
)

CASES: list[Case] = [
    Case(
        primitive=n,
        fn=fn,
        args=args,
        unplanned="all-reduce" if n in LOOPS else "",
        why=LOOPS.get(n, ""),
    )
    for n, (fn, args) in ELEMENTWISE.items()
]
case = adder(CASES)

case("sin", "matrix", lax.sin, floats(8, 4))
case("add", "matrix", lax.add, floats(8, 4), floats(8, 4))
case("clamp", "matrix", lambda x: lax.clamp(x - 0.1, x, x + 0.1), floats(8, 4))
case("mul", "row", lax.mul, floats(8, 4), floats(1, 4))
case("mul", "column", lax.mul, floats(8, 1, 4), floats(8, 4, 4))
case("mul", "both", lambda x, y: x * y, floats(8, 1), floats(1, 8))
case("mul", "scalar", lambda x: x * 2.0, X)
case("clamp", "scalars", lambda x: lax.clamp(0.2, x, 0.7), X)
case("select_n", "scalar", lax.select_n, np.array(True), floats(8, 4), floats(8, 4))
case("select_n", "three", lax.select_n, ints(8, high=3), X, Y, X)
case("convert_element_type", "cut", lambda x: (9 * x).astype(jnp.int32), X)
