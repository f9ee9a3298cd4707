"""From cases to plans: where a search may cut stages."""

import pytest

from aliquot.graph import cut_layers
from aliquot.suites import alpa_suites, build_case
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
