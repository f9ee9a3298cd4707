"""Runs one operator split as its rule says, two ways: by hand on local pieces, and by the compiler
under shardings.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aliquot.graph import KERNEL, Literal, capture, kernel_on_pieces
from aliquot.graph import _jax_compat as compat
from aliquot.sharding import dim_rule

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
)
# Programs here run once, on a few numbers: fast machine code would cost more than it saves.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COMBINE = {
    "max": lax.pmax,
    "min": lax.pmin,
    "sum": lax.psum,
    "prod": lambda x, axis: jnp.prod(lax.all_gather(x, axis), axis=0),
    "and": lambda x, axis: functools.reduce(jnp.bitwise_and, lax.all_gather(x, axis)),
    "or": lambda x, axis: functools.reduce(jnp.bitwise_or, lax.all_gather(x, axis)),
}
NEUTRAL = {"sum": 0, "prod": 1}


class Split:
    """One operator of a case with its operands; `parts` maps each mesh axis in use to the factor
    that it splits.
    """

    def __init__(self, op, rule, operands, parts):
        self.op, self.rule, self.operands, self.parts = op, rule, operands, parts

    def __repr__(self):
        return f"{self.op.name} {self.rule.operands} -> {self.rule.results} with {self.parts}"

    def count(self):
        """Into how many pieces each factor is cut."""
        count = dict.fromkeys(self.rule.sizes, 1)
        for axis, factor in self.parts.items():
            count[factor] *= {"x": 4, "y": 2}[axis]
        return count

    def divides(self):
        return all(self.rule.sizes[factor] % n == 0 for factor, n in self.count().items())

    @property
    def reduced(self):
        return {axis: factor for axis, factor in self.parts.items() if factor in self.rule.reduced}

    def spec(self, dims):
        """The PartitionSpec of an array with these factors."""
        return jax.P(*(tuple(a for a, f in self.parts.items() if f in dim) or None for dim in dims))

    def needs_position(self):
        """Whether a piece depends on where in the whole it stands, which the operator on local
        shapes cannot know.

        True of what counts along a split dim, and of indices into a split dim: there the compiler
        is asked instead.
        """
        name, (first, *rest) = self.op.name, self.rule.operands or ((),)
        used = set(self.parts.values())
        if name in ("iota", "random_bits", "random_split"):
            return not used <= set("".join(first))
        if name == "ragged_dot_general":
            # The numbers of rows and of groups, which tell which row meets which.
            return True
        if name == "gather":
            return bool(used & self.rule.reduced)
        if name.startswith("scatter"):
            return bool(used & set("".join(first)) - set("".join(rest[1])))
        return False

    def local_params(self):
        """The parameters for local shapes: those that state a shape, or count groups, shrink with
        the split.
        """
        count = self.count()

        def shrink(shape, dims):
            return tuple(
                n // int(np.prod([count[c] for c in dim if c != "1"]))
                for n, dim in zip(shape, dims)
            )

        params = dict(self.op.params)
        result = self.rule.results[0] if self.rule.results else ()
        match self.op.name:
            case "broadcast_in_dim":
                params["shape"] = shrink(params["shape"], result)
            case "reshape":
                params["new_sizes"] = shrink(params["new_sizes"], result)
            case "dynamic_slice" | "slice":
                key = "slice_sizes" if self.op.name == "dynamic_slice" else "limit_indices"
                params[key] = shrink(params[key], self.rule.operands[0])
            case "tile":
                before = self.rule.operands[0]
                params["reps"] = shrink(
                    params["reps"], [new if old == "1" else "1" for old, new in zip(before, result)]
                )
            case "gather":
                batching = params["dimension_numbers"].operand_batching_dims
                dims = [
                    "1" if d in batching else dim for d, dim in enumerate(self.rule.operands[0])
                ]
                params["slice_sizes"] = shrink(params["slice_sizes"], dims)
            case "conv_general_dilated":
                for key in ("feature_group_count", "batch_group_count"):
                    if params[key] > 1:
                        params[key] //= count["a"]
        return params

    def by_hand(self, mesh):
        """The result put together from the operator on local pieces, reduced over the axes of
        reduced factors.
        """

        def local(*operands):
            operands = list(operands)
            if self.op.name.startswith("scatter") and self.rule.reduce in NEUTRAL:
                # The array that is updated counts once.
                for axis in self.reduced:
                    neutral = jnp.full_like(operands[0], NEUTRAL[self.rule.reduce])
                    operands[0] = jnp.where(lax.axis_index(axis) == 0, operands[0], neutral)
            if self.op.name == KERNEL:
                eqn = kernel_on_pieces(self.op.eqn, [o.shape for o in operands])
                return eqn.primitive.bind(*operands, **eqn.params)
            results = self.op.eqn.primitive.bind(*operands, **self.local_params())
            results = results if self.op.eqn.primitive.multiple_results else [results]
            for axis in self.reduced:
                results = [COMBINE[self.rule.reduce](r, axis) for r in results]
            return results

        specs = [self.spec(dims) for dims in self.rule.operands]
        out_specs = [self.spec(dims) for dims in self.rule.results]
        return jax.shard_map(
            local, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False
        )

    def shardings(self, mesh):
        """Shardings of operands and results."""
        return [
            [jax.NamedSharding(mesh, self.spec(dims)) for dims in side]
            for side in (self.rule.operands, self.rule.results)
        ]


_OPERATORS = {}


def operators(case):
    """The different operators of the case's primitive, each with its rule and the values of its
    operands.
    """
    if str(case) not in _OPERATORS:
        _OPERATORS[str(case)] = _find_operators(case)
    return _OPERATORS[str(case)]


def _find_operators(case):
    # A capture wants an argument.
    fn, args = (case.fn, case.args) if case.args else (lambda _: case.fn(), (np.float32(0),))
    graph = capture(fn, *args)
    found = [op for op in graph.ops if op.name == case.primitive]
    assert found, f"{case} has only {[op.name for op in graph.ops]}"
    for op in found:
        check_form(op, dim_rule(op, graph), graph)
    if not case.runs:
        return [(op, dim_rule(op, graph), None) for op in found]
    values = dict(graph.constants)
    values |= {item.value: jnp.asarray(arg) for item, arg in zip(graph.inputs, args, strict=True)}

    def read(operand):
        return (
            jnp.asarray(operand.value, operand.dtype)
            if isinstance(operand, Literal)
            else values[operand]
        )

    done = []
    for op in graph.ops:
        operands = [read(o) for o in op.inputs]
        if op in found:
            done.append((op, dim_rule(op, graph), operands))
        for index, value in zip(op.outputs, compat.bind(op.eqn, operands), strict=True):
            values[index] = value
    return done


def check_form(op, rule, graph):
    """A rule names a factor for each dim of each array, of the right size, and only such
    factors.
    """
    shapes = [o.shape if isinstance(o, Literal) else graph.values[o].shape for o in op.inputs]
    shapes += [v.aval.shape if hasattr(v.aval, "shape") else () for v in op.eqn.outvars]
    arrays = (*rule.operands, *rule.results)
    assert [
        tuple(math.prod(rule.sizes.get(c, 1) for c in dim) for dim in dims) for dims in arrays
    ] == shapes, op.name
    assert {c for dims in arrays for dim in dims for c in dim} - {"1"} == set(rule.sizes), op.name
    assert all(c.isupper() or c == "1" for dims in arrays for dim in dims for c in dim[1:]), (
        "a minor factor is split"
    )
    assert len(rule.linear) in (0, len(op.inputs)), op.name


def splits(op, rule, operands):
    """Every factor on one axis, every factor on both, every pair of factors, on a mesh of 4 by 2,
    where they divide.
    """
    wanted = [[{"x": f}, {"y": f}] for f in rule.factors] + [
        [{"x": f, "y": f}] for f in rule.factors
    ]
    wanted += [
        [{"x": f, "y": g}, {"x": g, "y": f}] for f, g in itertools.combinations(rule.factors, 2)
    ]
    found = []
    for ways in wanted:
        splits = [Split(op, rule, operands, parts) for parts in ways]
        found += [s for s in splits if s.divides()][:1]
    return found


def compiled(cuts, mesh):
    """One program that runs all these splits, with the operands and results of each placed as its
    rule says.
    """

    def run(all_operands):
        return [compat.bind(s.op.eqn, operands) for s, operands in zip(cuts, all_operands)]

    placed = [s.shardings(mesh) for s in cuts]
    jitted = jax.jit(
        run, in_shardings=([p[0] for p in placed],), out_shardings=[p[1] for p in placed]
    )
    return jitted.lower([s.operands for s in cuts]).compile(QUICK)


def collectives(cuts, mesh):
    """Kinds of collectives in that program."""
    return set(COLLECTIVE.findall(compiled(cuts, mesh).as_text()))


def is_key(value):
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def numbers(value):
    """An array as NumPy has it; of keys, their words."""
    if is_key(value):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_same(got, want, case, split):
    """Results equal those of the whole operator: integers exactly, others to the tolerance of the
    case.
    """
    for g, w in zip(got, want, strict=True):
        g, w = numbers(g), numbers(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), split
        if g.dtype.kind in "biu":
            np.testing.assert_array_equal(g, w, err_msg=repr(split))
        else:
            g, w = (a.astype(np.complex64 if a.dtype.kind == "c" else np.float32) for a in (g, w))
            np.testing.assert_allclose(
                g, w, rtol=case.tolerance, atol=case.tolerance, err_msg=repr(split)
            )
