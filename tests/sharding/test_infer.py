"""Rules of primitives without a declared one: what is inferred is true, and what cannot be tried
stays whole.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding.rule_case import floats, ints
from sharding.rule_cases import RULE_CASES, one_of_each
from sharding.rule_cases_elementwise import ELEMENTWISE
from unknown_primitives import (
    primitive,
    row_norm_gradients_p,
    row_norm_p,
    shared_scale_p,
    soft_cap_p,
)

from aliquot.core import CaptureError, InputError, MissingRuleError
from aliquot.graph import Literal, capture
from aliquot.sharding import dim_rule, plan_micro_batches
from aliquot.sharding._infer import infer_rule

DOUBLE_P = primitive("double_test", lambda x: 2 * x)
CASES = {
    "elementwise": (lambda x: soft_cap_p.bind(x, cap=3.0), (floats(64, 32),), "ab", ["ab"]),
    "rows": (row_norm_p.bind, (floats(64, 32), floats(32)), "a.,.", ["a."]),
    "square": (row_norm_p.bind, (floats(32, 32), floats(32)), "a.,.", ["a."]),
    "two results": (row_norm_gradients_p.bind, (floats(4, 16, 32), floats(32), floats(4, 16, 32)), "ab.,.,ab.", ["ab.", "ab."]),
    "all depend on all": (shared_scale_p.bind, (floats(64, 32),), "..", [".."]),
    "integers": (primitive("lookup_test", lambda t, i: t[i]).bind, (floats(64, 32), ints(16, high=64)), ".a,b", ["ba"]),
    "product": (primitive("product_test", lambda x, y: x @ y).bind, (floats(32, 32), floats(32, 32)), "a.,.b", ["ab"]),
    "gram": (primitive("gram_test", lambda x: x @ x.T).bind, (floats(32, 16),), "..", [".."]),
    "factorisation": (primitive("exp_of_matrix_test", jax.scipy.linalg.expm).bind, (floats(6, 256, 256),), "a..", ["a.."]),
    "bfloat16": (DOUBLE_P.bind, (jnp.ones((64, 32), jnp.bfloat16),), "ab", ["ab"]),
    "complex": (DOUBLE_P.bind, (floats(64, 32) + 1j,), "ab", ["ab"]),
    "ones": (DOUBLE_P.bind, (floats(64, 1),), "a1", ["a1"]),
    "scalar": (DOUBLE_P.bind, (np.float32(1),), "", [""]),
    "empty": (DOUBLE_P.bind, (floats(0, 32),), "..", [".."]),
}  # fmt: skip


def inferred(fn, *args):
    graph = capture(fn, *args)
    (op,) = graph.ops
    return dim_rule(op, graph)


def letters(arrays):
    """Factors of each array, with a point for each that stays whole."""
    return ["".join("." if names.isupper() else names for names in dims) for dims in arrays]


def parts(rule):
    """Which dims of which arrays each factor that may be split runs through."""
    if rule is None:
        return set()
    arrays = (*rule.operands, *rule.results)
    return {
        frozenset(
            (k, d)
            for k, dims in enumerate(arrays)
            for d, names in enumerate(dims)
            if names[0] == factor
        )
        for factor in rule.factors
    }


@pytest.mark.parametrize("name", CASES)
def test_inferred_splits_of_primitives(name):
    fn, args, operands, results = CASES[name]
    found = inferred(fn, *args)
    assert ",".join(letters(found.operands)) == operands and letters(found.results) == results
    assert found.linear == () and not found.reduced


def test_parameters_that_name_a_size_keep_it():
    reshaped = primitive("reshape_test", lambda x, *, shape: x.reshape(shape))
    assert inferred(lambda x: reshaped.bind(x, shape=(64, 32)), floats(32, 64)).factors == ()
    windows = primitive("first_rows_test", lambda x, *, rows: x[:rows])
    assert letters(inferred(lambda x: windows.bind(x, rows=16), floats(16, 32)).operands) == [".a"]


def test_splits_that_hold_for_one_size_alone_are_rejected():
    odd = primitive("odd_test", lambda x: x if x.shape[0] in (1, 3, 4) else x - jnp.mean(x, axis=0))
    assert letters(inferred(odd.bind, floats(64, 32)).operands) == [".a"]


def test_primitives_that_cannot_be_evaluated_run_whole():
    def refuses(x):
        raise RuntimeError("this kernel exists for accelerators only")

    elsewhere = primitive("elsewhere_test", lambda x: x)
    jax.interpreters.mlir.register_lowering(elsewhere, lambda *_: refuses(None))
    assert inferred(elsewhere.bind, floats(64, 32)).factors == ()


def test_another_word_for_missing_rules_is_refused():
    graph = capture(DOUBLE_P.bind, floats(4))
    with pytest.raises(InputError, match='can be "infer", "error", "replicate"'):
        dim_rule(graph.ops[0], graph, on_missing_rule="guess")


def test_the_same_rule_every_time():
    assert inferred(row_norm_p.bind, floats(64, 32), floats(32)) == inferred(
        row_norm_p.bind, floats(64, 32), floats(32)
    )


# What is true and not declared, as nothing splits it: what is asked of the whole is asked of a
# batch of vectors or matrices.
MORE_THAN_DECLARED = {
    "experts": "columns of the last matrix are independent, but share the work before it",
    "noinline": "declared whole, whatever it calls",
    "ormqr": "columns of the matrix that is multiplied are independent",
    "tridiagonal_solve": "so are right-hand sides",
}
NOT_ALONE = {"debug_callback", "debug_print", "io_callback"}
SLOW = {"igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"}


@pytest.mark.parametrize(
    "case", one_of_each([c for c in RULE_CASES if c.runs and c.primitive not in SLOW]), ids=str
)
def test_no_more_is_inferred_than_is_declared(case):
    fn, args = (case.fn, case.args) if case.args else (lambda _: case.fn(), (np.float32(0),))
    graph = capture(fn, *args)
    for op in graph.ops:
        if op.name != case.primitive or op.eqn is None:
            continue
        operands = [o if isinstance(o, Literal) else graph.values[o] for o in op.inputs]
        results = [tuple(getattr(v.aval, "shape", ())) for v in op.eqn.outvars]
        found, declared = parts(infer_rule(op.eqn, operands, results)), parts(dim_rule(op, graph))
        if case.primitive in MORE_THAN_DECLARED:
            assert not found <= declared
        else:
            assert found <= declared
        if case.primitive in ELEMENTWISE:
            assert found == declared


def test_no_device_is_looked_for():
    code = """
from unknown_primitives import row_norm_p
import numpy as np
import jax
from jax._src import xla_bridge
from aliquot.graph import capture
from aliquot.sharding import dim_rule, plan_micro_batches
struct = jax.ShapeDtypeStruct
graph = capture(row_norm_p.bind, struct((64, 32), "float32"), struct((32,), "float32"))
assert dim_rule(graph.ops[0], graph).factors == ("a",)
assert not xla_bridge.backends_are_initialized()
"""
    folder = str(Path(__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})" + code], check=True
    )


def per_example(primitive):
    """A step that returns what a primitive makes of the rows that a batch becomes."""
    return capture(
        lambda params, batch: (params, primitive(batch["x"] @ params)),
        floats(32, 8),
        {"x": floats(64, 32)},
    )


def normalised(x):
    return row_norm_p.bind(x, jnp.ones(8))


def test_micro_batches_follow_inferred_rules():
    plan = plan_micro_batches(per_example(normalised), 2)
    assert plan.combine["[1]"] == "concatenate 0"
    assert not set(plan.actions.values())


@pytest.mark.parametrize(
    ("primitive", "on_missing_rule"),
    [(shared_scale_p.bind, "infer"), (normalised, "replicate")],
    ids=["all", "replicate"],
)
def test_a_layer_that_needs_the_whole_batch_is_refused_in_micro_batches(primitive, on_missing_rule):
    with pytest.raises(CaptureError, match="needs a dim of the batch as a whole"):
        plan_micro_batches(per_example(primitive), 2, on_missing_rule=on_missing_rule)


def test_micro_batches_of_a_step_without_a_rule_can_be_refused():
    with pytest.raises(MissingRuleError, match="`row_norm_test`"):
        plan_micro_batches(per_example(normalised), 2, on_missing_rule="error")
