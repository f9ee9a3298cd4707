"""From cases to plans: where a search may cut stages."""

from dataclasses import replace

import jax
import pytest

from aliquot.graph import cut_layers
from aliquot.suites import alpa_suites, build_case, small_case
from aliquot.suites._plan_case import search_layers


@pytest.mark.parametrize(
    ("suite", "number", "least"),
    [
        ("moe.grid_search_auto", 1, 8),
        pytest.param("gpt.grid_search_auto", 1, 6, marks=pytest.mark.slow),
        pytest.param("moe.grid_search_auto", 15, 16, marks=pytest.mark.slow),
        pytest.param("wresnet.grid_search_auto", 3, 16, marks=pytest.mark.slow),
    ],
)
def test_a_search_has_as_many_layers_as_its_case_asks_for(suite, number, least):
    """Also where there are no more blocks than that, and few places inside of them."""
    built = build_case(alpa_suites()[suite].cases[number - 1])
    assert built.case.num_layers == least
    assert len(cut_layers(built.graph, layers=search_layers(built)).names) >= least


def test_a_forward_pass_of_experts_is_their_loss_with_parameters_in_16_bits():
    case = small_case(alpa_suites()["moe_inference.profile"].cases[6], 8)
    built = build_case(replace(case, dtype="float16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(built.state)} == {"float16"}
    params = jax.jit(built.init)(jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), built.state
    )
    result = jax.eval_shape(built.step, built.state, built.batch)
    assert result["loss"].shape == ()
