"""What primitives declare beside their rules is true of every case in the table of rules."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from sharding.rule_cases import RULE_CASES, one_of_each
from sharding.splitting import numbers, operators

from aliquot.graph import _jax_compat as compat
from aliquot.graph import _rule, capture, registered_primitives, split_scans, traits_of
from aliquot.graph._split_equations import Equations
from aliquot.graph._split_rows import local_rule
from aliquot.sharding import Moves, Traits, register_dim_rule, rule, same_parameters

LINKS = {"scan_slice", "scan_stack", "tie"}
JOINS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
JOINS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def cases(has_trait):
    return [case for case in RULE_CASES if case.runs and has_trait(traits_of(case.primitive))]


def evaluated(case):
    """Each operator of a case with its operands and its results."""
    for op, op_rule, operands in operators(case):
        yield op, op_rule, operands, compat.bind(op.eqn, operands)


@pytest.mark.parametrize("case", cases(lambda traits: traits.adds), ids=str)
def test_sums_are_sums(case):
    for _, op_rule, operands, (result,) in evaluated(case):
        np.testing.assert_allclose(result, sum(map(numbers, operands)), rtol=1e-6)
        assert op_rule.linear == (1,) * len(operands)


@pytest.mark.parametrize("case", cases(lambda traits: traits.multiplies), ids=str)
def test_products_are_linear_in_both_factors_and_have_work(case):
    for _, op_rule, _, _ in evaluated(case):
        assert op_rule.contracts and op_rule.linear == (1, 2) and op_rule.flops > 0
        assert traits_of(case.primitive).costly


@pytest.mark.parametrize("case", cases(lambda traits: traits.moves), ids=str)
def test_moves_compute_nothing(case):
    moves = traits_of(case.primitive).moves
    for op, _, (operand, *_), (result,) in evaluated(case):
        before, after = numbers(operand), numbers(result)
        if moves is Moves.COPY:
            np.testing.assert_array_equal(after, before)
        elif moves is Moves.CAST:
            np.testing.assert_array_equal(after, before.astype(after.dtype))
        elif moves is Moves.NEGATE:
            np.testing.assert_array_equal(after, -before)
        elif moves is Moves.TRANSPOSE:
            np.testing.assert_array_equal(after, before.transpose(op.params["permutation"]))
        elif moves is Moves.RESHAPE and op.params.get("dimensions") is None:
            np.testing.assert_array_equal(after.ravel(), before.ravel())
        else:
            assert set(after.ravel().tolist()) <= set(before.ravel().tolist())
            assert moves is not Moves.RESHAPE or after.size == before.size


def values_of(case):
    """The values of the graph in which the case's operators stand."""
    fn, args = (case.fn, case.args) if case.args else (lambda _: case.fn(), (np.float32(0),))
    return capture(fn, *args).values


@pytest.mark.parametrize("case", one_of_each(cases(lambda traits: traits.on_rows)), ids=str)
def test_operators_on_ranges_of_rows_give_rows_of_the_result(case):
    for op, _, operands, results in evaluated(case):
        shapes = [o.shape for o in (*operands, *results)]
        for rows in {shape[0] for shape in shapes if shape and shape[0] > 1}:
            local = local_rule(op, values_of(case), rows)
            if local is None or local.counts_rows:
                continue
            bounds = (0, rows // 3 or 1, rows)
            parts = [
                _on_range(op, local, operands, start, stop)
                for start, stop in zip(bounds[:-1], bounds[1:])
            ]
            for k, whole in enumerate(results):
                pieces = [part[k] for part in parts]
                if local.join:
                    joined = JOINS[local.join](*map(numbers, pieces))
                else:
                    joined = np.concatenate([numbers(piece) for piece in pieces])
                np.testing.assert_allclose(joined, numbers(whole), rtol=case.tolerance)


def _on_range(op, local, operands, start, stop):
    eqn = Equations().on_rows(op.eqn, local, stop - start)
    taken = [o[start:stop] if has else o for o, has in zip(operands, local.operands, strict=True)]
    return compat.bind(eqn, taken)


def test_some_case_of_every_reduction_and_move_is_cut_into_rows():
    cut_by_rows = set()
    for case in cases(lambda traits: traits.on_rows and (traits.join or traits.moves)):
        for op, _, operands, results in evaluated(case):
            values = values_of(case)
            sizes = {o.shape[0] for o in (*operands, *results) if o.shape}
            if any(local_rule(op, values, rows) for rows in sizes):
                cut_by_rows.add(case.primitive)
    declared = {p for p in registered_primitives() - LINKS if traits_of(p).on_rows}
    assert cut_by_rows >= {p for p in declared if traits_of(p).join or traits_of(p).moves} - {
        "copy"
    }


def scale_rows(x, scale):
    return x * scale


@pytest.mark.parametrize("declared", [True, False])
def test_a_primitive_of_the_users_own_can_be_cut_by_layers(declared, monkeypatch):
    """A scan over layers is split where the update runs through it, if it says that it runs row by
    row.
    """
    monkeypatch.setattr(_rule, "_declarations", dict(_rule._declarations))
    primitive = Primitive("scale_rows")
    primitive.def_impl(scale_rows)
    primitive.def_abstract_eval(lambda x, scale: x)
    mlir.register_lowering(primitive, mlir.lower_fun(scale_rows, multiple_results=False))
    traits = Traits(on_rows=same_parameters) if declared else Traits()

    @register_dim_rule(primitive, traits=traits)
    def _scale_rows(operands, results, params):
        return rule("abc,->abc", operands, results, linear=(1, 2))

    def step(params, x):
        import jax

        def loss(params):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

        grads = jax.grad(loss)(params)
        return params - primitive.bind(grads, jnp.float32(0.1)), loss(params)

    split = split_scans(
        capture(step, np.ones((4, 8, 8), np.float32), np.ones((2, 8), np.float32)), (0, 2, 4)
    )
    count = sum(op.name == "scale_rows" for op in split.graph.ops)
    assert count == (2 if declared else 1)
    assert bool(split.joined) == (not declared)
