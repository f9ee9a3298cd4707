"""Every rule tells the truth: each split that it allows gives the unsplit numbers, with the
communication it states.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding import rule_cases_shapes
from sharding.rule_cases import RULE_CASES, one_of_each
from sharding.rule_cases_elementwise import ABSENT
from sharding.splitting import (
    QUICK,
    assert_same,
    collectives,
    compiled,
    is_key,
    numbers,
    operators,
    splits,
)

from aliquot.graph import _jax_compat as compat
from aliquot.sharding import registered_primitives

LINKS = {"scan_slice", "scan_stack", "tie"}
EXCHANGING = {"concatenate", "pad", "reshape", "rev", "slice", "split", "tile"}
RUN = [case for case in RULE_CASES if case.runs]


def test_every_rule_has_a_case():
    assert registered_primitives() - LINKS - ABSENT == {case.primitive for case in RULE_CASES}


@pytest.mark.parametrize("case", RUN, ids=str)
def test_every_split_computes_the_same_numbers(case, mesh):
    grid = mesh(4, 2)
    for op, op_rule, operands in operators(case):
        want = compat.bind(op.eqn, operands)
        cuts = splits(op, op_rule, operands)
        alone = [s for s in cuts if not s.needs_position()]
        placed = [s for s in cuts if s.needs_position()]
        by_hand = [s.by_hand(grid) for s in alone]

        def run(operands, by_hand=by_hand):
            return [piece(*operands) for piece in by_hand]

        # Arrays of NumPy are cut without a program for each cut.
        operands = [o if is_key(o) else np.asarray(o) for o in operands]
        results = jax.jit(run, compiler_options=QUICK)(operands) if alone else []
        if placed:
            program = compiled(placed, grid)
            results += program(
                jax.device_put([operands] * len(placed), [s.shardings(grid)[0] for s in placed])
            )
        for split, got in zip(alone + placed, results, strict=True):
            assert_same(got, want, case, split)


@pytest.mark.parametrize("case", [c for c in RUN if c.primitive in EXCHANGING], ids=str)
def test_elements_are_exchanged_along_the_named_dims_only(case):
    for op, op_rule, operands in operators(case):
        sizes = [np.size(operand) for operand in operands]
        starts = np.cumsum([0, *sizes])
        # Each element is its own number, by which it is found in the results.
        numbered = [
            (start + np.arange(size)).reshape(np.shape(operand)).astype(np.asarray(operand).dtype)
            for start, size, operand in zip(starts, sizes, operands, strict=False)
        ]
        moved = frozenset().union(*op_rule.exchanged)
        for result, dims in zip(compat.bind(op.eqn, numbered), op_rule.results, strict=True):
            for place, number in np.ndenumerate(np.asarray(result)):
                k = int(np.searchsorted(starts, number, side="right")) - 1
                came_from = np.unravel_index(int(number) - starts[k], np.shape(numbered[k]))
                for before, factors in enumerate(op_rule.operands[k]):
                    if factors != "1" and not moved & set(factors) and factors in dims:
                        assert came_from[before] == place[dims.index(factors)]


def test_each_rule_that_exchanges_has_a_case():
    shapes = [c for c in rule_cases_shapes.CASES if c.runs]
    assert {c.primitive for c in shapes for _, r, _ in operators(c) if r.exchanged} == EXCHANGING


@pytest.mark.parametrize("case", one_of_each(RUN), ids=str)
def test_splits_need_no_other_communication(case, mesh):
    grid = mesh(4, 2)
    for op, op_rule, operands in operators(case):
        cuts = splits(op, op_rule, operands)
        for reduces, allowed in ((False, set()), (True, {"all-reduce"})):
            group = [s for s in cuts if bool(s.reduced) == reduces]
            allowed |= {case.unplanned}
            if group and not collectives(group, grid) <= allowed:
                found = {repr(s): collectives([s], grid) for s in group}
                raise AssertionError(
                    {split: kinds for split, kinds in found.items() if not kinds <= allowed}
                )


@pytest.mark.parametrize("case", [c for c in RULE_CASES if not c.runs], ids=str)
def test_operators_that_are_not_run_have_a_rule_that_fits(case):
    for op, op_rule, _ in operators(case):
        assert len(op_rule.operands) == len(op.inputs) and len(op_rule.results) == len(op.outputs)
        assert all(op_rule.sizes[letter] > 0 for letter in op_rule.factors)


def is_number(operand):
    return not is_key(operand) and operand.dtype != bool


@pytest.mark.parametrize("case", RUN, ids=str)
def test_linear_means_linear(case):
    """In the operands that share a number, the others held, the operator of a sum is the sum of its
    results.
    """
    for op, op_rule, operands in operators(case):
        for number in sorted(set(op_rule.linear) - {0}):
            varied = [k for k, n in enumerate(op_rule.linear) if n == number]
            if not all(is_number(operands[k]) for k in varied):
                continue

            a = [jnp.flip(o) if k in varied else o for k, o in enumerate(operands)]
            b = [2 * jnp.roll(o, 1) if k in varied else o for k, o in enumerate(operands)]
            both = [x + y if k in varied else x for k, (x, y) in enumerate(zip(a, b, strict=True))]
            results = (compat.bind(op.eqn, inputs) for inputs in (both, a, b))
            for total, one, two in zip(*results, strict=True):
                rounding = 2e-2 if total.dtype == jnp.bfloat16 else 1e-4
                np.testing.assert_allclose(
                    numbers(total), numbers(one + two), rtol=rounding, atol=rounding
                )
