"""The table of rules: registration, what is said where a rule is missing, links, and counts of
work.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

from aliquot.core import MissingRuleError
from aliquot.graph import _rule, capture
from aliquot.sharding import dim_rule, register_dim_rule, rule


@pytest.fixture
def table(monkeypatch):
    """The table of rules, restored afterwards."""
    monkeypatch.setattr(_rule, "_declarations", dict(_rule._declarations))
    return _rule._declarations


def rules_of(fn, *args, name):
    graph = capture(fn, *args)
    return [dim_rule(op, graph) for op in graph.ops if op.name == name]


def test_a_second_rule_for_a_primitive_is_refused(table):
    with pytest.raises(ValueError, match="`sin` has a dimension rule already"):
        register_dim_rule(jax.lax.sin_p if hasattr(jax.lax, "sin_p") else "sin")(table["cos"].rule)


def test_a_missing_rule_says_what_to_do(table):
    del table["sort"]
    graph = capture(jnp.sort, np.zeros((8, 4), np.float32))
    (op,) = [op for op in graph.ops if op.name == "sort"]
    with pytest.raises(MissingRuleError) as error:
        dim_rule(op, graph, on_missing_rule="error")
    for part in ("`sort`", "(8, 4)", 'register_dim_rule("sort")', 'on_missing_rule="replicate"'):
        assert part in str(error.value)
    replicated = dim_rule(op, graph, on_missing_rule="replicate")
    assert replicated.factors == () and replicated.operands == (("A", "B"),)


def test_a_kernel_is_whole_until_its_author_says_more(table):
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    x = np.zeros((8, 4), np.float32)
    doubled = pallas.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    assert rules_of(doubled, x, name="pallas_call")[0].factors == ()

    @register_dim_rule("pallas_call")
    def elementwise(operands, results, params):
        return rule("ab->ab", operands, results)

    assert rules_of(doubled, x, name="pallas_call")[0].factors == ("a", "b")
    with pytest.raises(ValueError, match="already"):
        register_dim_rule("pallas_call")(elementwise)


def test_loops_keep_their_leading_dim_whole():
    def scanned(x):
        return lax.scan(lambda carry, row: (carry + row, carry * row), jnp.zeros(4), x)

    x = np.zeros((6, 4), np.float32)
    (into,) = rules_of(scanned, x, name="scan_slice")
    (out,) = rules_of(scanned, x, name="scan_stack")
    assert (into.operands, into.results) == ((("A", "a"),), (("a",),))
    assert (out.operands, out.results) == ((("a",),), (("A", "a"),))
    for tie in rules_of(scanned, x, name="tie"):
        assert set(tie.operands) == {("a",)} == set(tie.results)


def floats(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("fn", "args", "name", "flops"),
    [
        (jnp.matmul, (floats(3, 5, 7), floats(3, 7, 2)), "dot_general", 2 * 3 * 5 * 7 * 2),
        (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (floats(2, 3, 6, 6), floats(4, 3, 5, 5)),
         "conv_general_dilated", 2 * 2 * 36 * 4 * 3 * 25),
        (lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=3),
         (floats(2, 6, 8), floats(9, 2, 3)), "conv_general_dilated", 2 * 2 * 8 * 9 * 2 * 3),
        (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (floats(2, 3, 6, 6), floats(4, 3, 1, 1)),
         "conv_general_dilated", 2 * 2 * 36 * 4 * 3),
        (jnp.sin, (floats(8),), "sin", 0),
    ],
)  # fmt: skip
def test_work_is_counted(fn, args, name, flops):
    (found,) = rules_of(fn, *args, name=name)
    assert found.flops == pytest.approx(flops)


def test_the_gradients_of_a_convolution_cost_what_it_costs():
    def loss(x, k):
        return jnp.sum(lax.conv(x, k, (2, 2), "VALID") ** 2)

    found = rules_of(
        jax.grad(loss, (0, 1)), floats(2, 3, 8, 8), floats(4, 3, 2, 2), name="conv_general_dilated"
    )
    assert [r.flops for r in found] == pytest.approx([2 * 2 * 16 * 4 * 3 * 4] * 3)


def test_conversions_are_linear_where_nothing_is_cut_off():
    def linear(dtype, to):
        (found,) = rules_of(
            lambda x: x.astype(to), jax.ShapeDtypeStruct((4,), dtype), name="convert_element_type"
        )
        return found.linear == (1,)

    assert (
        linear("float32", "bfloat16") and linear("int32", "float32") and linear("bool", "float32")
    )
    assert (
        not linear("float32", "int32")
        and not linear("int32", "bool")
        and not linear("float32", "bool")
    )


def test_only_threefry_draws_the_same_bits_however_they_are_split():
    def bits(impl):
        (found,) = rules_of(
            lambda raw: jax.random.bits(jax.random.wrap_key_data(raw, impl=impl), (8, 4)),
            np.zeros(2 if impl == "threefry2x32" else 4, np.uint32),
            name="random_bits",
        )
        return found.factors

    assert bits("threefry2x32") == ("a", "b")
    assert bits("rbg") == ()
